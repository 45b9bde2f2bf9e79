"""The packages of the `demo` extra."""

from importlib.util import find_spec

PACKAGES = ("sklearn", "matplotlib", "threadpoolctl")


class MissingExtra(ImportError):
    """Raised when a package of the `demo` extra is not installed."""


def check_extra() -> None:
    """Raises `MissingExtra` if a package of the `demo` extra is not installed. Imports none of them."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise MissingExtra(
            f'The demo needs packages that are not installed: {", ".join(missing)}. Run: pip install "gradscale[demo]"'
        )
