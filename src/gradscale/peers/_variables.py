"""Variables of another system, found in a checkpoint by the last part of their names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradscale.peers._saved import Saved

_TENSORFLOW_SUFFIX = re.compile(r"(:0)?(/\.ATTRIBUTES/VARIABLE_VALUE)?$")


def last_name(key: str) -> str:
    """Returns the last part of a variable's name, without what TensorFlow puts behind it.

    >>> last_name("model/loss_scale/good_steps/.ATTRIBUTES/VARIABLE_VALUE")
    'good_steps'
    """
    return re.split(r"[/.]", _TENSORFLOW_SUFFIX.sub("", str(key)))[-1]


def picked(what: str, mapping: Mapping[str, Any], required: Sequence[str], settings: Sequence[str] = ()) -> Saved:
    """Returns the variables called `required`, and those of the `settings` that are there.

    A key is a bare name, or a path that ends in one: `optimizer/loss_scale/good_steps`, `manager.scale_sense`. Paths
    that end in another name belong to the rest of the checkpoint; a bare name must be known.
    """
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        name = last_name(key)
        if name != str(key) and name not in (*required, *settings):
            continue
        if name in found:
            raise ValueError(f"{what} saves one `{name}`. Received two, the second as {key!r}. Pass the part of one.")
        found[name] = value
    return Saved(what, found).only(*required, *(name for name in settings if name in found))


def without_weights(mapping: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns `mapping` without the arrays and tensors that are called other than `names`.

    For systems whose checkpoints have bare names for everything. A plain number stays: it was put there by hand.
    """
    return {key: value for key, value in mapping.items() if last_name(key) in names or not hasattr(value, "shape")}


def given(saved: Saved, *numbers: str, counts: Sequence[str] = ()) -> dict[str, Any]:
    """Returns those of the named settings that were saved, as Python numbers, for the keywords of a preset."""
    values: dict[str, Any] = {name: saved.number(name) for name in numbers if name in saved.values}
    return values | {name: saved.count(name) for name in counts if name in saved.values}
