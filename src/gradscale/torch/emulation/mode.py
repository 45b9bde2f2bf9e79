"""The mode that rounds around each torch function that is called inside an `emulate` block.

Importing this loads torch's compiler, which takes a second, to exclude the mode from it. So it is imported by the first
block, and not by `gradscale.torch`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscale.formats import BF16, FP16, FP32
from gradscale.torch.cast import map_tensors, tensors_in
from gradscale.torch.casting.rules import autocast_devices, floating, without_autocast
from gradscale.torch.compat import uncompiled
from gradscale.torch.emulation.lists import (
    DECOMPOSED,
    EMBEDDINGS,
    FLOAT32,
    HALF,
    LIKE_FIRST,
    LIKE_SECOND,
    NOT_OPERANDS,
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
        self.rounds = (values.format, grads.format) != (FP32, FP32)
        self._values = values
        self._grads = grads
        self._elementwise = values.format in ELEMENTWISE
        self._low_precision = LowPrecision()

    @uncompiled(UNCOMPILED)
    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The overloads of an operator are named "mm.default" and "mm.out".
        name = getattr(func, "__name__", "").partition(".")[0]
        if self.paused:
            return func(*args, **kwargs)
        if self.rounds and torch._C._is_any_autocast_enabled():
            # Autocast would cast what is emulated: FP16 tensors are not.
            devices = autocast_devices(floating(args, kwargs))
            return without_autocast(devices, self._run, (name, func, args, kwargs), {})
        return self._run(name, func, args, kwargs)

    def _run(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function by the rule that its name is listed under."""
        if name in PRODUCTS or name in EMBEDDINGS or (name in HALF and self._elementwise):
            return self._product(name, func, args, kwargs)
        if name.endswith("_") and name[:-1] in PRODUCTS:
            return self._product_in_place(name[:-1], args, kwargs)
        if name in DECOMPOSED:
            # torch disables a mode while its `__torch_function__` runs: entered again, it sees the calls inside.
            with self:
                return _decomposed(func)(*args, **kwargs)
        if not self._elementwise or name in FLOAT32:
            return func(*args, **kwargs)
        return self._promote(name, func, args, kwargs)

    def run_scripted(self, names: Collection[str], func: Function, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a TorchScript function whose operations have these names.

        Rounds the result as that of one function: a fused kernel rounds at its end, too. The operations themselves are
        not seen, so that those with products are refused.
        """
        if products := sorted(name for name in names if name.removesuffix("_") in PRODUCTS | EMBEDDINGS):
            raise RuntimeError(
                "`emulate` cannot round inside TorchScript, whose products would run in float32. "
                f"Received: a scripted or traced function with {', '.join(products[:5])}. Run the Python function, for "
                'all scripts by PYTORCH_JIT=0, or leave it in float32 with `with emulate("fp32"):` around it.'
            )
        # Not called by torch, which would disable the mode: rounding must not be rounded.
        with torch._C.DisableTorchFunction():
            if not self._elementwise or not FLOAT32.isdisjoint(names):
                return func(*args, **kwargs)
            return self._promote("", func, args, kwargs)

    def _product(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the product of rounded operands, rounded."""
        count = OPERANDS.get(name, len(args))
        operands = [map_tensors(arg, self._round_operand) for arg in args[:count]]
        named = {
            key: arg if key in NOT_OPERANDS else map_tensors(arg, self._round_operand) for key, arg in kwargs.items()
        }
        # The result may be `out`, the caller's tensor: all of it has just been written, and may be rounded.
        result = func(*operands, *args[count:], **named)
        return map_tensors(result, self._round_in_place if name in EMBEDDINGS else self._round_result)

    def _product_in_place(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Puts the product of rounded operands, rounded, into the first of them, and returns that."""
        # `copy_`, which autograd records: the gradient of the tensor from before goes through the product.
        target = args[0].copy_(self._product(name, getattr(Tensor, name), args, kwargs))
        return self._low_precision.mark(target) if is_emulated(target) else target

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
        # As in torch's type promotion, `out` has no part in it: it takes the result.
        deciding = args[:1] if name in LIKE_FIRST else (*args, *(kwargs[key] for key in kwargs if key != "out"))
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
