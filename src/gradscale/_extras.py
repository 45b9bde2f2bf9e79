"""What an import says when a package is missing that only an extra installs."""

import sys
from importlib.util import find_spec

INSTALL = {
    "keras": 'pip install "gradscale[keras,torch]", or with jax or tensorflow as the backend',
    "mxnet": 'pip install "gradscale[mxnet]" in an environment of its own: MXNet needs Python 3.11 and numpy 1.23',
}
"""How an extra is installed, where `pip install "gradscale[extra]"` is not enough."""


class MissingExtra(ModuleNotFoundError):
    """Raised where a package that an extra installs is missing. The message has the command that installs it."""


def how_to_install(extra: str) -> str:
    """Returns the command that adds an extra to the gradscale that is installed, and what else there is to know."""
    return INSTALL.get(extra, f'pip install "gradscale[{extra}]"')


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
        install = f"pip install {' '.join(missing)}" if extra is None else how_to_install(extra)
        verb = "is" if len(missing) == 1 else "are"
        message = f"{user} needs {', '.join(missing)}, which {verb} not installed. Run: {install}"
        raise MissingExtra(message, name=missing[0])
