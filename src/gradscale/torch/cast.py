"""Casts the tensors in nested containers: the arguments of a function, the inputs and outputs of a module."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type

HALF_DTYPES = (torch.float16, torch.bfloat16)


def cast(value: Any, dtype: torch.dtype, castable: Collection[torch.dtype]) -> Any:
    """Returns `value` with every tensor in it whose dtype is in `castable` cast to `dtype`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.dtype in castable else tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with `change` applied to every tensor in it.

    Descends into tuples, lists, dicts, named tuples, dataclasses, packed sequences and everything registered as a
    pytree. A container with a changed tensor is copied. Any other is returned itself, since the model may write to it,
    as to a cache of keys and values.
    """
    return _mapped(value, change)[0]


def tensors_in(value: Any) -> list[Tensor]:
    """Returns every tensor that `map_tensors` would change."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in _opened(value)[0] for tensor in tensors_in(item)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """Returns the new value, and whether it differs. (`torch.compile` cannot trace `is` between containers.)"""
    if isinstance(value, Tensor):
        new = change(value)
        return new, new is not value
    items, rebuild = _opened(value)
    mapped = [_mapped(item, change) for item in items]
    if not any([changed for _, changed in mapped]):
        return value, False
    return rebuild([new for new, _ in mapped]), True


def _opened(value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any]]:
    """Returns the items of a container, and a function that builds the container from others; else no items."""
    if isinstance(value, PackedSequence):
        return [value.data], lambda new: value._replace(data=new[0])
    if node := SUPPORTED_NODES.get(_get_node_type(value)):  # opened here, since `tree_flatten` opens what is inside too
        items, context = node.flatten_fn(value)
        return items, lambda new: node.unflatten_fn(new, context)
    if isinstance(value, Mapping):
        return list(value.values()), lambda new: _copy_with(value, value, new, operator.setitem)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [getattr(value, name) for name in names], lambda new: _copy_with(value, names, new, object.__setattr__)
    return (), lambda new: value


def _copy_with(whole: Any, keys: Iterable[Any], items: list[Any], put: Callable[[Any, Any, Any], None]) -> Any:
    # Not a call of the constructor, which may check or compute. `object.__setattr__` writes to frozen dataclasses too.
    made = copy.copy(whole)
    for key, item in zip(keys, items, strict=True):
        put(made, key, item)
    return made
