"""The entry of `MasterWeights` in a saved state: every value in float32, whatever the storage."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.masters.master import Master

KEY = "masters"
VERSION = 1


def entry_of(values: Mapping[int, Tensor], storage: str, storage_state: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a saved state under `KEY`: the float32 values of 16-bit parameters, by their index."""
    return {"version": VERSION, "storage": storage, "values": dict(values), "storage_state": storage_state}


def check_entry(entry: Any, masters: Sequence[Master]) -> None:
    """Raises unless there are saved values for exactly the 16-bit parameters, each in its shape."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"Saved masters must be a dict, as `state_dict` returns it. Received: {type(entry).__name__}.")
    if entry.get("version") != VERSION:
        raise ValueError(
            f"Saved masters must be of version {VERSION}. Received: version={entry.get('version')!r}. "
            "Load them with the gradscale that saved them, or a newer one."
        )
    values = entry.get("values")
    tensors = isinstance(values, Mapping) and all(isinstance(value, Tensor) for value in values.values())
    if not tensors or not isinstance(entry.get("storage_state"), Mapping):
        raise ValueError(
            "Saved masters must have `values`, a dict of tensors, and `storage_state`, a dict. "
            f"Received: {', '.join(f'{name}: {type(part).__name__}' for name, part in entry.items())}. Load what "
            "`state_dict` returned."
        )
    wanted = {index: tuple(master.weight.shape) for index, master in enumerate(masters) if master.is_half}
    found = {index: tuple(value.shape) for index, value in entry["values"].items()}
    if wrong := sorted(index for index in wanted | found if wanted.get(index) != found.get(index)):
        index = wrong[0]
        raise ValueError(
            "Saved masters must fit the 16-bit parameters of the optimizer, one by one. "
            f"Parameter {index} has shape {wanted.get(index)}, and its saved master {found.get(index)}. "
            "Build the optimizer on the same model, in the same dtype, as when it was saved."
        )


def on_device(values: Mapping[int, Tensor], masters: Sequence[Master]) -> dict[int, Tensor]:
    """Returns copies of saved values on the devices of their parameters."""
    # Copied in any case: they are used at the next step, and the caller may change the dict before.
    return {
        index: value.detach().to(masters[index].weight.device, torch.float32, copy=True)
        for index, value in values.items()
    }
