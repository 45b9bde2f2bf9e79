"""The packages of the `demo` extra."""

from gradscale._extras import require

PACKAGES = ("sklearn", "matplotlib", "threadpoolctl")


def check_extra() -> None:
    """Raises `MissingExtra` if a package of the `demo` extra is not installed. Imports none of them."""
    require("The demo", *PACKAGES, extra="demo")
