"""The check that Keras and its backend are installed, made before anything else of this package is imported."""

from importlib.util import find_spec

from gradscale._extras import MissingExtra, require

BACKENDS = {"tensorflow": "tensorflow", "jax": '"gradscale[jax]"', "torch": '"gradscale[torch]"'}
"""The backends that can train, and what pip installs for each."""


def check_installed() -> None:
    """Imports Keras. Raises `MissingExtra`, with what to install, if Keras or the backend it is to use is missing."""
    require("gradscale.keras", "keras", extra="keras")
    try:
        import keras  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        backend = (error.name or "").partition(".")[0]
        if backend not in BACKENDS or find_spec(backend) is not None:
            raise  # something else is missing
        choices = ". ".join(f"{name}: pip install {target}" for name, target in BACKENDS.items())
        here = [name for name in BACKENDS if find_spec(name) is not None]
        fix = (
            f"Set KERAS_BACKEND={here[-1]}, which is installed"
            if here
            else f"Install one and set KERAS_BACKEND. {choices}"
        )
        raise MissingExtra(
            f"Keras needs a backend, and the one it is to use, {backend}, is not installed. Keras uses TensorFlow "
            f"unless KERAS_BACKEND or ~/.keras/keras.json names another. {fix}.",
            name=backend,
        ) from None
