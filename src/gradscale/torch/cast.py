"""Casts the tensors in nested containers: the arguments of a function, the inputs and outputs of a module."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

HALF_DTYPES = (torch.float16, torch.bfloat16)

LEAVES = (NoneType, EllipsisType, int, float, str, slice, torch.dtype, torch.device, torch.Size)
"""Types of common arguments that hold no tensor. Finding that out with `pytree` would be most of the cost of a call."""


def cast(value: Any, dtype: torch.dtype, castable: Collection[torch.dtype]) -> Any:
    """Returns `value` with every tensor in it whose dtype is in `castable` cast to `dtype`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.dtype in castable else tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with `change` applied to every tensor in it.

    Descends into tuples, lists, dicts, named tuples, dataclasses, packed sequences and everything registered as a
    pytree. A container with a changed tensor is copied. Any other is returned itself, since the model may write to it,
    as to a cache of keys and values.
    """
    return change(value) if isinstance(value, Tensor) else _mapped(value, change)[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor that `map_tensors` would change."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, LEAVES):
        for item in _opened(value)[0]:
            yield from tensors_in(item)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """Returns the new value, and whether it differs. (`torch.compile` cannot trace `is` between containers.)"""
    if isinstance(value, Tensor):
        new = change(value)
        return new, new is not value
    if isinstance(value, LEAVES):
        return value, False
    items, rebuild = _opened(value)
    mapped = [_mapped(item, change) for item in items]
    if not any([changed for _, changed in mapped]):
        return value, False
    return rebuild([new for new, _ in mapped]), True


def _opened(value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]]:
    """Returns the items of a container, and a function that builds the container from others; else no items."""
    # Nearly all containers are one of these, and pytrees are far slower.
    if type(value) is tuple or type(value) is list:
        return value, type(value)
    if type(value) is dict:
        return list(value.values()), lambda new: dict(zip(value, new, strict=True))
    if isinstance(value, PackedSequence):
        return [value.data], lambda new: value._replace(data=new[0])
    items, tree = tree_flatten(value, is_leaf=lambda item: item is not value)
    if not tree.is_leaf():
        return items, lambda new: tree_unflatten(new, tree)
    if isinstance(value, Mapping):
        return list(value.values()), lambda new: _copy_with(value, dict(value), new, _set_item)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return list(fields.values()), lambda new: _copy_with(value, fields, new, object.__setattr__)
    return (), lambda new: value


def _copy_with(whole: Any, old: Mapping[Any, Any], new: list[Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """Returns a copy of `whole` with its changed items replaced."""
    # Not a call of the constructor, which may check or compute. `object.__setattr__` writes to frozen dataclasses too.
    made = copy.copy(whole)
    for (key, before), item in zip(old.items(), new, strict=True):
        if item is not before:
            put(made, key, item)
    return made


def _set_item(mapping: Any, key: Any, item: Any) -> None:
    mapping[key] = item
