"""Masters in a saved state: every value in float32, whatever the storage.

A value is saved beside the inner optimizer's state of its parameter, as if it were part of it. There
`torch.distributed.checkpoint` finds it, which renames parameters and drops entries that it does not know. Where the
inner optimizer has no state, the value is in an entry of its own: an optimizer takes a state that it finds as complete.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.masters.distributed import redistributed_as
from gradscale.torch.masters.master import Master

KEY = "masters"
VALUE = "master"
VERSION = 1


def with_masters(
    state_dict: dict[str, Any], values: Mapping[int, Tensor], storage: str, storage_state: dict[str, Any]
) -> dict[str, Any]:
    """Returns the inner optimizer's state with the float32 values of 16-bit parameters, given by their position."""
    state: dict[Any, Any] = dict(state_dict["state"])
    rest: dict[int, Tensor] = {}
    for index, key in enumerate(_keys(state_dict)):
        if index in values and state.get(key):
            state[key] = {**state[key], VALUE: values[index]}
        elif index in values:
            rest[index] = values[index]
    entry = {"version": VERSION, "storage": storage, "values": rest, "storage_state": storage_state}
    return {**state_dict, "state": state, KEY: entry}


def without_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the inner optimizer's part of a saved state."""
    state = {
        key: {name: value for name, value in each.items() if name != VALUE} if isinstance(each, Mapping) else each
        for key, each in state_dict["state"].items()
    }
    return {name: value for name, value in state_dict.items() if name != KEY} | {"state": state}


def masters_in(state_dict: dict[str, Any], masters: Sequence[Master]) -> dict[int, Tensor]:
    """Returns the values in a saved state by the position of their parameters; none of a plain optimizer's.

    Raises unless there are values for exactly the 16-bit parameters, each in its shape. Without the entry, which
    `torch.distributed.checkpoint` drops together with the state of frozen parameters, there may be fewer.
    """
    state, entry = state_dict["state"], state_dict.get(KEY)
    values = {
        index: state[key][VALUE]
        for index, key in enumerate(_keys(state_dict))
        if isinstance(state.get(key), Mapping) and VALUE in state[key]
    }
    if entry is not None:
        _check_entry(entry)
        values |= entry["values"]
    if not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError(f"Saved masters must be tensors. Received: {', '.join(map(_kind, values.values()))}.")
    wanted = {index: tuple(master.weight.shape) for index, master in enumerate(masters) if master.is_half}
    found = {index: tuple(value.shape) for index, value in values.items()}
    needed = found if entry is None else wanted | found
    if wrong := sorted(index for index in needed if wanted.get(index) != found.get(index)):
        index = wrong[0]
        raise ValueError(
            "Saved masters must fit the 16-bit parameters of the optimizer, one by one. "
            f"Parameter {index} has shape {wanted.get(index)}, and its saved master {found.get(index)}. "
            "Build the optimizer on the same model, in the same dtype, as when it was saved."
        )
    return values


def _check_entry(entry: Any) -> None:
    if not isinstance(entry, Mapping):
        raise TypeError(f"Saved masters must be a dict, as `state_dict` returns it. Received: {_kind(entry)}.")
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
            f"Received: {', '.join(f'{name}: {_kind(part)}' for name, part in entry.items())}. Load what "
            "`state_dict` returned."
        )


def _kind(value: Any) -> str:
    return type(value).__name__


def _keys(state_dict: dict[str, Any]) -> list[Any]:
    """Returns what the saved state has its parameters by, in their order: numbers, or names."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def on_device(values: Mapping[int, Tensor], masters: Sequence[Master]) -> dict[int, Tensor]:
    """Returns copies of saved values on the devices of their parameters, distributed as these are."""
    # Copied in any case: they are used at the next step, and the caller may change the dict before.
    weights = {index: masters[index].weight for index in values}
    return {
        index: redistributed_as(weight, values[index].detach().to(weight.device, torch.float32, copy=True))
        for index, weight in weights.items()
    }
