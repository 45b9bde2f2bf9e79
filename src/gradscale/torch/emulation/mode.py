"""The mode that rounds around each torch function that is called inside an `emulate` block.

Importing this loads torch's compiler, which takes a second, to exclude the mode from it. So it is imported by the first
block, and not by `gradscale.torch`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscale.formats import BF16, FP16
from gradscale.torch.cast import map_tensors, tensors_in
from gradscale.torch.emulation.lists import (
    DECOMPOSED,
    EMBEDDINGS,
    FLOAT32,
    LIKE_FIRST,
    LIKE_SECOND,
    MASKS,
    OPERANDS,
    PRODUCTS,
)
from gradscale.torch.emulation.low_precision import LowPrecision, is_emulated, share_memory
from gradscale.torch.emulation.rounding import Rounding, round_copy, round_grads, round_result

Function = Callable[..., Any]

ELEMENTWISE = (FP16, BF16)
"""Formats in which torch also computes element by element. In the others no machine does: only products use them, and
everything between is float32."""

UNCOMPILED = "`gradscale.torch.emulate` runs uncompiled. Leave out `fullgraph`."


class EmulationMode(TorchFunctionMode):
    """One block: rounds operands and results of products, and promotes the dtypes of other functions as autocast would.

    Args:
        values: rounds values.
        grads: rounds gradients.
    """

    def __init__(self, values: Rounding, grads: Rounding) -> None:
        super().__init__()
        self.paused = False
        self._values = values
        self._grads = grads
        self._elementwise = values.format in ELEMENTWISE
        self._low_precision = LowPrecision()

    @torch.compiler.disable(reason=UNCOMPILED)
    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # `out` is the caller's tensor, and other tensors may share its memory: it is not rounded.
        if self.paused or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if name in PRODUCTS or name in EMBEDDINGS:
            return self._product(name, func, args, kwargs)
        if name in DECOMPOSED:
            # torch disables a mode while its `__torch_function__` runs: entered again, it sees the calls inside.
            with self:
                return _decomposed(func)(*args, **kwargs)
        if not self._elementwise or name in FLOAT32:
            return func(*args, **kwargs)
        return self._promote(name, func, args, kwargs)

    def _product(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the product of rounded operands, rounded."""
        count = OPERANDS.get(name, len(args))
        operands = [map_tensors(arg, self._round_operand) for arg in args[:count]]
        named = {key: arg if key in MASKS else map_tensors(arg, self._round_operand) for key, arg in kwargs.items()}
        result = func(*operands, *args[count:], **named)
        return map_tensors(result, self._round_in_place if name in EMBEDDINGS else self._round_result)

    def _round_operand(self, tensor: Tensor) -> Tensor:
        """Returns an operand of a product, rounded unless it is so already. Its gradient is rounded in any case."""
        # A parameter is rounded at every use. A cache, as autocast has for its casts, would have to know when it
        # changes, and fused optimizers change parameters without raising their version.
        if not is_emulated(tensor):
            return tensor
        if tensor in self._low_precision:
            # A view: the hook is for this use, and the gradient of every use is rounded before they are summed.
            return round_grads(tensor.view_as(tensor), self._grads)
        return round_copy(tensor, self._values, self._grads)

    def _round_result(self, tensor: Tensor) -> Tensor:
        """Rounds a result in place, marks it as low precision, and returns it."""
        return self._low_precision.mark(self._round_in_place(tensor)) if is_emulated(tensor) else tensor

    def _round_in_place(self, tensor: Tensor) -> Tensor:
        return round_result(tensor, self._values, self._grads) if is_emulated(tensor) else tensor

    def _promote(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function, rounded where autocast would compute it in FP16 or BF16.

        That is where all tensors in the arguments are low precision. As in torch's type promotion, a tensor without
        dimensions does not count beside one with.
        """
        deciding = args[:1] if name in LIKE_FIRST else (*args, *kwargs.values())
        given = [tensor for arg in deciding for tensor in tensors_in(arg) if is_emulated(tensor)]
        low = [tensor for tensor in given if tensor in self._low_precision]
        if not low:
            return func(*args, **kwargs)
        if name in LIKE_SECOND and len(given) == 2:
            return self._like(given[1], func(*args, **kwargs))
        if name == "float" or any(arg is torch.float32 for arg in (*args, *kwargs.values())):
            return map_tensors(func(*args, **kwargs), _unmarked)
        promoted = [tensor for tensor in given if tensor.dim()] or given
        # Before the call, which may change a tensor in place and so remove its mark. `__get__` reads a property.
        rounds = name != "__get__" and all(tensor in self._low_precision for tensor in promoted)
        result = func(*args, **kwargs)
        for tensor in low:
            if tensor not in self._low_precision:  # the function changed it in place
                self._round_result(tensor)
        return map_tensors(result, partial(self._promoted, given, rounds))

    def _promoted(self, given: Sequence[Tensor], rounds: bool, tensor: Tensor) -> Tensor:
        """Returns a result of a function with low-precision tensors among its arguments."""
        if not is_emulated(tensor) or tensor in self._low_precision:
            return tensor
        if shared := [other for other in given if share_memory(tensor, other)]:
            # A view of a rounded tensor is rounded already, and rounding it in place would change the other tensor.
            return self._low_precision.mark(tensor) if shared[0] in self._low_precision else tensor
        return self._round_result(tensor) if rounds else tensor

    def _like(self, other: Tensor, tensor: Tensor) -> Tensor:
        """Returns a tensor with the precision of another: low precision if that one is, else float32."""
        if (tensor in self._low_precision) is (other in self._low_precision):
            return tensor
        if tensor in self._low_precision:
            return _unmarked(tensor)
        return self._low_precision.mark(self._round_operand(tensor))


def _unmarked(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor, which has no mark: a cast to float32 is not low precision any more."""
    return tensor.view_as(tensor)


@cache
def _decomposed(func: FunctionType) -> FunctionType:
    """Returns a Python function of torch that runs its body, and so calls its operations, inside the mode."""
    # Such a function first calls `has_torch_function`, which is True in any mode, and would call the mode again without
    # end. A copy of the function, with another global of that name, does not change torch for other code.
    names = func.__globals__ | {"has_torch_function": lambda tensors: False}
    decomposed = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    decomposed.__kwdefaults__ = func.__kwdefaults__
    return decomposed
