"""Which Keras and which backend there must be, checked before anything else of this package is imported.

What differs between versions is checked by feature. All else in this package is the same from `LOWEST` on.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from gradscale._extras import MissingExtra, require

BACKENDS = {"tensorflow": "tensorflow", "jax": '"gradscale[jax]"', "torch": '"gradscale[torch]"'}
"""The backends that can train, and what pip installs for each."""

require("gradscale.keras", "keras", extra="keras")
try:
    import keras
except ModuleNotFoundError as error:
    backend = (error.name or "").partition(".")[0]
    if backend not in BACKENDS or find_spec(backend) is not None:
        raise  # something else is missing
    choices = ". ".join(f"{name}: pip install {target}" for name, target in BACKENDS.items())
    here = [name for name in BACKENDS if find_spec(name) is not None]
    fix = (
        f"Set KERAS_BACKEND={here[-1]}, which is installed" if here else f"Install one and set KERAS_BACKEND. {choices}"
    )
    raise MissingExtra(
        f"Keras needs a backend, and the one it is to use, {backend}, is not installed. Keras uses TensorFlow "
        f"unless KERAS_BACKEND or ~/.keras/keras.json names another. {fix}.",
        name=backend,
    ) from None

LOWEST = (3, 9)
"""The first version whose own `LossScaleOptimizer` has the `iterations` of its inner optimizer, not its own at 0."""

# By version: a check for that property could refuse a newer Keras that has it elsewhere.
if tuple(map(int, re.findall(r"\d+", keras.__version__)[:2])) < LOWEST:
    raise ImportError(
        f"gradscale.keras needs keras {'.'.join(map(str, LOWEST))} or newer. Received: keras {keras.__version__}. "
        'Install a newer one: pip install -U "gradscale[keras]".'
    )

STEPS_WITHOUT_GRADIENTS = hasattr(keras.optimizers.Optimizer, "_overwrite_variable_with_gradient")
"""Whether an optimizer takes a step in which every gradient overwrites its variable: from Keras 3.10 on.

Before, it overwrites the variables, and then raises that there are no gradients.
"""

# Of all its bases: that of TensorFlow takes `*args, **kwargs`.
INNER_DEFAULTS = {
    name: parameter.default
    for kind in keras.optimizers.Optimizer.__mro__
    for name, parameter in inspect.signature(kind.__init__).parameters.items()
}
"""The settings of every optimizer with their defaults."""


def check_overwritten(overwritten: Sequence[bool]) -> None:
    """Raises if the gradients of a step all overwrite their variables, and this version of Keras cannot do that.

    Args:
        overwritten: for each gradient whether it is the next value of its variable.
    """
    if not STEPS_WITHOUT_GRADIENTS and overwritten and all(overwritten):
        raise ValueError(
            "A step needs a gradient that does not overwrite its variable, unless Keras is 3.10 or newer. Received: "
            f"only such gradients, with keras {keras.__version__}. Install a newer one: pip install -U keras."
        )


def check_inner_settings(settings: Mapping[str, Any]) -> None:
    """Raises if a setting of the inner optimizer was given to the outer one, which does nothing with it.

    Keras refuses these itself from 3.12 on, and accepts them without effect before. Files that such a version wrote
    have all of them, with their defaults.

    Args:
        settings: arguments of the outer optimizer that are not its own.
    """
    known = {name: value for name, value in settings.items() if name in INNER_DEFAULTS}
    if given := [f"{name}={value!r}" for name, value in known.items() if value != INNER_DEFAULTS[name]]:
        names = ", ".join(f"`{each.partition('=')[0]}`" for each in given)
        raise ValueError(
            f"Settings of an update belong to the inner optimizer. Received: {', '.join(given)}. "
            f"Instead, set {names} on the `inner_optimizer`."
        )
