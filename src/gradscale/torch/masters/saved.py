"""What `MasterWeights` saves beside the state of the optimizer inside: every value in float32, whatever the kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.masters.slot import NARROW, Slot

KEY = "masters"
VERSION = 1


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state with its 16-bit tensors in float32."""
    return {
        name: value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value
        for name, value in state.items()
    }


def entry_of(values: Mapping[int, Tensor], kind: str, way_state: dict[str, Any]) -> dict[str, Any]:
    """Returns what goes into a saved state under `KEY`: plain values and tensors.

    Args:
        values: the value of each 16-bit parameter in float32, by its place among all parameters.
        kind: how their low bits were kept.
        way_state: what else that takes.
    """
    return {"version": VERSION, "kind": kind, "values": dict(values), "way": way_state}


def check_entry(entry: Mapping[str, Any], slots: Sequence[Slot]) -> None:
    """Raises unless saved values are there for exactly the 16-bit parameters, each in its shape."""
    if entry.get("version") != VERSION:
        raise ValueError(
            f"Saved masters must be of version {VERSION}. Received: version={entry.get('version')!r}. "
            "Load them with the gradscale that saved them, or a newer one."
        )
    wanted = {index: tuple(slot.weight.shape) for index, slot in enumerate(slots) if slot.narrow}
    found = {index: tuple(value.shape) for index, value in entry["values"].items()}
    if wrong := sorted(index for index in wanted | found if wanted.get(index) != found.get(index)):
        index = wrong[0]
        raise ValueError(
            "Saved masters must fit the 16-bit parameters of the optimizer, one by one. "
            f"Parameter {index} has shape {wanted.get(index)}, and its saved master {found.get(index)}. "
            "Build the optimizer on the same model, in the same type, as when it was saved."
        )


def on_device(values: Mapping[int, Tensor], slots: Sequence[Slot]) -> dict[int, Tensor]:
    """Returns copies of saved values where their parameters are."""
    return {
        index: value.detach().to(slots[index].weight.device, torch.float32, copy=True)
        for index, value in values.items()
    }
