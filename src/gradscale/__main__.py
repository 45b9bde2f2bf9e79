"""The command `gradscale`, also as `python -m gradscale`."""

import sys

from gradscale._extras import MissingExtra


def main() -> None:
    """Runs the command line. Without the packages of the `cli` extra, says so in one line and exits with 1."""
    try:
        from gradscale.cli import main as run
    except MissingExtra as error:
        sys.exit(f"Error: {error}")
    run()


if __name__ == "__main__":
    main()
