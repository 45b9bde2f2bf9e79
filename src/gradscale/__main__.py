"""The command `gradscale`, also as `python -m gradscale`."""

import sys

from gradscale._extras import MissingExtra

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of the signal."""


def main() -> None:
    """Runs the command line. Without the packages of the `cli` extra, says so in one line and exits with 1."""
    try:
        from gradscale.cli import main as run

        run()
    except MissingExtra as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:  # while modules are imported; commands have their own way
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
