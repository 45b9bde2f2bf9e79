"""What happens to each torch function that is called inside an `emulate` block.

Importing this loads torch's compiler, to tell it to keep out: a second that the first block takes, and no import of
`gradscale.torch`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscale.formats import BF16, FP16
from gradscale.torch.emulation.lists import (
    EMBEDDINGS,
    LED_BY_FIRST,
    LIKE_ANOTHER,
    MASKS,
    OPENED,
    OPERANDS,
    PRODUCTS,
    WIDE,
)
from gradscale.torch.emulation.narrow import Narrow, is_rounded_here, share_memory
from gradscale.torch.emulation.rounded import round_grads, round_result, rounded
from gradscale.torch.emulation.rounding import Rounding

Function = Callable[..., Any]

FOLLOWED = (FP16, BF16)
"""Formats that torch computes in. In the others no machine adds or multiplies element by element, so they are used by
products alone, and what lies between is float32."""

UNCOMPILED = "`gradscale.torch.emulate` runs uncompiled. Leave out `fullgraph`."


class Mode(TorchFunctionMode):
    """One block: rounds what products take and give, and lets other functions follow.

    Args:
        values: rounds on the way forward.
        grads: rounds on the way back.
    """

    def __init__(self, values: Rounding, grads: Rounding) -> None:
        super().__init__()
        self.paused = False
        self._values = values
        self._grads = grads
        self._follows = values.format in FOLLOWED
        self._narrow = Narrow()

    @torch.compiler.disable(reason=UNCOMPILED)
    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.paused or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if name in PRODUCTS or name in EMBEDDINGS:
            return self._product(name, func, args, kwargs)
        if name in OPENED:
            with self:
                return _opened(func)(*args, **kwargs)
        if not self._follows or name in WIDE:
            return func(*args, **kwargs)
        return self._follow(name, func, args, kwargs)

    def _product(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the product of rounded operands, rounded."""
        count = OPERANDS.get(name, len(args))
        operands = [_each(arg, self._enter) for arg in args[:count]]
        named = {key: arg if key in MASKS else _each(arg, self._enter) for key, arg in kwargs.items()}
        leave = self._round_in_place if name in EMBEDDINGS else self._leave
        return _each(func(*operands, *args[count:], **named), leave)

    def _enter(self, tensor: Tensor) -> Tensor:
        """Returns an operand of a product, rounded unless it is so already. Its gradient is rounded in any case.

        A parameter is rounded at every use. To keep it, as autocast keeps its casts, one would have to know when it
        changes, and fused optimizers change parameters without raising their version.
        """
        if not is_rounded_here(tensor):
            return tensor
        if tensor in self._narrow:
            return round_grads(tensor.view_as(tensor), self._grads)
        return rounded(tensor, self._values, self._grads)

    def _leave(self, tensor: Tensor) -> Tensor:
        """Rounds a result in place, marks it as narrow, and returns it."""
        return self._narrow.mark(self._round_in_place(tensor)) if is_rounded_here(tensor) else tensor

    def _round_in_place(self, tensor: Tensor) -> Tensor:
        return round_result(tensor, self._values, self._grads) if is_rounded_here(tensor) else tensor

    def _follow(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what the function gives: rounded where autocast would leave it to FP16 or BF16.

        That is where all tensors given are narrow. As in torch's promotion, one without dimensions does not count
        beside one with.
        """
        leading = args[:1] if name in LED_BY_FIRST else (*args, *kwargs.values())
        given = [tensor for tensor in _tensors(leading) if is_rounded_here(tensor)]
        narrow = [tensor for tensor in given if tensor in self._narrow]
        if not narrow:
            return func(*args, **kwargs)
        if name in LIKE_ANOTHER and len(given) == 2:
            return self._like(given[1], func(*args, **kwargs))
        if name == "float" or any(arg is torch.float32 for arg in (*args, *kwargs.values())):
            return _each(func(*args, **kwargs), _unmarked)
        deciding = [tensor for tensor in given if tensor.dim()] or given
        rounds = name != "__get__" and all(tensor in self._narrow for tensor in deciding)
        result = func(*args, **kwargs)
        for tensor in narrow:
            if tensor not in self._narrow:  # it was changed in place
                self._leave(tensor)
        return _each(result, partial(self._after, given, rounds))

    def _like(self, other: Tensor, tensor: Tensor) -> Tensor:
        """Returns a tensor that was brought to the type of another: narrow if that one is, else float32."""
        if (tensor in self._narrow) is (other in self._narrow):
            return tensor
        return _unmarked(tensor) if tensor in self._narrow else self._narrow.mark(self._enter(tensor))

    def _after(self, given: Sequence[Tensor], rounds: bool, tensor: Tensor) -> Tensor:
        """Returns a result of a function that was given narrow tensors, among others."""
        if not is_rounded_here(tensor) or tensor in self._narrow:
            return tensor
        if shared := [other for other in given if share_memory(tensor, other)]:
            return self._narrow.mark(tensor) if shared[0] in self._narrow else tensor
        return self._leave(tensor) if rounds else tensor


def _unmarked(tensor: Tensor) -> Tensor:
    """Returns the tensor as another object: what was asked for in float32 is not narrow, even if it was before."""
    return tensor.view_as(tensor)


def _each(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the item with each of its tensors changed, in lists and tuples too."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, list | tuple):
        make = getattr(item, "_make", type(item))  # a named tuple takes its parts one by one
        return make([_each(part, change) for part in item])
    return item


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)


@cache
def _opened(func: FunctionType) -> FunctionType:
    """Returns a Python function of torch's that does its work instead of asking the mode again what to do.

    The first thing such a function does is to ask `has_torch_function`, which is true in any mode.
    """
    names = func.__globals__ | {"has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
