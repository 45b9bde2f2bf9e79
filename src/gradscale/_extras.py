"""What an import says when a package is missing that only an extra installs."""

import sys
from importlib.util import find_spec


class MissingExtra(ModuleNotFoundError):
    """Raised where a package that an extra installs is missing. The message has the command that installs it."""


def installed(package: str) -> bool:
    """Returns whether a package can be imported. Does not import it."""
    # What is loaded is there, even a stand-in of a test or a documentation tool, for which `find_spec` would raise.
    return sys.modules.get(package) is not None or find_spec(package) is not None


def require(user: str, *packages: str, extra: str | None = None) -> None:
    """Raises `MissingExtra` if a package that `user` needs is not installed. Imports none of them.

    Args:
        user: what needs the packages, as the message names it.
        packages: names to import.
        extra: of gradscale, which installs them; None where none does, and pip installs them by their own names.
    """
    if missing := [name for name in packages if not installed(name)]:
        target = " ".join(missing) if extra is None else f'"gradscale[{extra}]"'
        verb = "is" if len(missing) == 1 else "are"
        message = f"{user} needs {', '.join(missing)}, which {verb} not installed. Run: pip install {target}"
        raise MissingExtra(message, name=missing[0])
