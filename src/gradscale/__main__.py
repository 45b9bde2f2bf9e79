"""Runs the command line: `python -m gradscale`."""

from gradscale.cli import main

if __name__ == "__main__":
    main()
