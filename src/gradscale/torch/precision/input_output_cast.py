"""The border of a module: tensors that come in and go out are cast there, and its precision is set in between."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

CAST = (torch.float32, torch.float16, torch.bfloat16)
"""What is cast into one another. Integers, float64 and complex numbers mean something by being what they are."""


@dataclass(frozen=True, slots=True)
class Border:
    """What happens to a call of a module.

    Attributes:
        inputs: dtype that tensors are cast to on their way in; None leaves them as they are.
        autocast: dtype of `torch.autocast` inside; `torch.float32` switches it off there; None leaves it as it is.
        outputs: dtype that tensors are cast to on their way out; None leaves them as they are.
        precision: what the module was prepared with, where it is a whole model; None for a part of one.
    """

    inputs: torch.dtype | None
    autocast: torch.dtype | None
    outputs: torch.dtype | None
    precision: Any = None

    def context(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Returns what `module` runs inside of."""
        if self.autocast is None:
            return nullcontext()
        device = _device(module)
        if self.autocast is torch.float32:
            return torch.autocast(device, enabled=False)
        return torch.autocast(device, dtype=self.autocast)


class Bordered(nn.Module):
    """What a module with a border is, besides what it was: `set_border` makes a class of the two.

    A class, because the module stays the object it was, with the names in its `state_dict`, and copies and pickles of
    it keep the border. An attribute on the module that holds the old `forward` would keep calling the original.
    """

    # For a new module that is built by calling the class of another, `type(model)(...)`: it has no border of its own.
    _gradscale_border = Border(None, None, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how to copy or pickle the module: by its own class, as the class with the border has no name."""
        make, args, *rest = super().__reduce_ex__(protocol)
        plain = tuple(unbordered(type(self)) if arg is type(self) else arg for arg in args)
        return (_remade, (self._gradscale_border, make, plain), *rest)


def set_border(module: nn.Module, border: Border) -> None:
    """Makes every call of `module` go through `border`. Changes its class to a subclass of the same name."""
    module.__class__ = _bordered(unbordered(type(module)))
    module._gradscale_border = border  # type: ignore[assignment]


def border_of(module: nn.Module) -> Border | None:
    """Returns the border of a module, or None if it has none."""
    return vars(module).get("_gradscale_border")


def unbordered(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a module had before it got a border."""
    return kind.__mro__[kind.__mro__.index(Bordered) + 1] if issubclass(kind, Bordered) else kind


@cache
def _bordered(kind: type[nn.Module]) -> type[nn.Module]:
    run = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        border: Border = self._gradscale_border
        args, kwargs = cast(args, border.inputs), cast(kwargs, border.inputs)
        with border.context(self):
            outputs = run(self, *args, **kwargs)
        return cast(outputs, border.outputs)

    # `torch.compile` counts recompilations by code object, and gives up after a few: every class gets its own.
    forward.__code__ = forward.__code__.replace()
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Bordered, kind), {"forward": wraps(run)(forward), **names})


def _remade(border: Border, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    set_border(module, border)
    return module


def _device(module: nn.Module) -> str:
    """Returns the type of the device that the module is on now: it may have been moved since it got its border."""
    first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns `value` with every float32, FP16 or BF16 tensor in it in `dtype`; None casts nothing.

    Goes into tuples, lists, dicts, named tuples, dataclasses, packed sequences and whatever is registered as a pytree.
    No container is written to: where something in it is cast, a copy comes back. Elsewhere it is the same object, for
    a model may be meant to write to it, as to a cache of keys and values.
    """
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CAST else value
    # Nearly all containers are one of these, and pytrees are far slower.
    if type(value) is tuple or type(value) is list:
        items = [cast(item, dtype) for item in value]
        return value if _same(items, value) else type(value)(items)
    if type(value) is dict:
        entries = {key: cast(item, dtype) for key, item in value.items()}
        return value if _same(entries.values(), value.values()) else entries
    return _cast_rare(value, dtype)


def _cast_rare(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=cast(value.data, dtype))
    items, tree = tree_flatten(value, is_leaf=lambda item: item is not value)
    if not tree.is_leaf():
        new = [cast(item, dtype) for item in items]
        return value if _same(new, items) else tree_unflatten(new, tree)
    if isinstance(value, Mapping):
        return _changed(value, value, dtype, lambda made, key, item: made.__setitem__(key, item))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _changed(value, fields, dtype, object.__setattr__)
    return value


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


def _changed(whole: Any, items: Mapping[Any, Any], dtype: torch.dtype, put: Callable[[Any, Any, Any], None]) -> Any:
    """Returns `whole`, or a copy of it with what had to be cast in `items` put in its place.

    A copy and not a new one: its constructor may check or compute, and frozen dataclasses are written to all the same.
    """
    casts = {key: cast(item, dtype) for key, item in items.items()}
    new = {key: item for key, item in casts.items() if item is not items[key]}
    if not new:
        return whole
    made = copy.copy(whole)
    for key, item in new.items():
        put(made, key, item)
    return made
