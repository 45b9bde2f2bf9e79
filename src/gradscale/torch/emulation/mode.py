"""The mode that rounds around each torch function that is called inside an `emulate` block.

In FP16 and BF16 it follows which float32 tensors hold numbers of the format, and would be of that dtype under autocast.
The lists of functions are those of `torch.autocast` on CUDA, with the losses of its list for the CPU and embeddings, by
name, since a function has many aliases: `torch.matmul`, `Tensor.matmul`, `@`.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscale.formats import BF16, FP16, FP32
from gradscale.torch.cast import map_tensors, tensors_in
from gradscale.torch.casting import autocast_devices, floating, without_autocast
from gradscale.torch.casting.catching import SCRIPT_HANDLERS, SCRIPTS, Function, PerThread, operations
from gradscale.torch.compat import uncompiled
from gradscale.torch.emulation.rounding import Rounding, round_copy, round_grads, round_result

ELEMENTWISE = (FP16, BF16)
"""Formats in which torch also computes element by element. In the others no machine does: only products use them, and
everything between is float32."""

UNCOMPILED = "`gradscale.torch.emulate` runs uncompiled. Leave out `fullgraph`."

MARK = "_gradscale_low_precision"
"""The attribute that marks tensors with numbers of the format. It refers to no tensor, and so keeps nothing alive. A
set of ids would not do: the id of a tensor is reused once it is freed."""

MODES = PerThread()
"""The blocks that a thread is in, the innermost last."""

PRODUCTS = frozenset(
    """
    linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm
    einsum tensordot inner chain_matmul linalg_multi_dot linalg_matmul linalg_vecdot
    conv1d conv2d conv3d conv_tbc convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention
    rnn_tanh rnn_relu lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell
    """.split()
)
"""Sums of products: what tensor cores compute. Operands and results are rounded; the sums are float32."""

EMBEDDINGS = frozenset(["embedding", "embedding_bag"])
"""Rounded like products, but their results count as float32 afterwards, as in autocast. So the residual stream of a
transformer stays float32."""

HALF = frozenset(["prelu"])
"""Computed element by element, but in FP16 and BF16 even of float32 arguments, as products are."""

FLOAT32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow __pow__ __rpow__ reciprocal rsqrt sinh tan
    __rdiv__ __rtruediv__ softplus
    cumprod cumsum dist norm prod sum renorm cdist pdist cosine_similarity normalize
    linalg_norm linalg_vector_norm linalg_matrix_norm
    softmax softmin log_softmax layer_norm group_norm rms_norm native_layer_norm native_group_norm
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss
    grid_sample stft trace quantile nanquantile
    """.split()
)
"""Functions whose results are always float32: they need range or precision."""

LIKE_FIRST = frozenset(["batch_norm", "instance_norm"])
"""Functions whose result has the precision of their first argument, although their parameters are float32."""

LIKE_SECOND = frozenset(["to", "type_as"])
"""Methods whose result has the precision of their second argument, where that is a tensor."""

NOT_OPERANDS = frozenset(["attn_mask", "out"])
"""Keyword arguments of products that are not rounded before. A mask has -inf, which not every format has."""


class EmulationMode(TorchFunctionMode):
    """One block: rounds operands and results of products, and promotes the dtypes of other functions as autocast would.

    Args:
        values: rounds values.
        grads: rounds gradients.
    """

    def __init__(self, values: Rounding, grads: Rounding) -> None:
        super().__init__()
        self._values = values
        self._grads = grads
        self._rounds = (values.format, grads.format) != (FP32, FP32)
        self._elementwise = values.format in ELEMENTWISE
        self._block = object()

    def __enter__(self) -> Self:
        MODES.items.append(self)
        for patch in SCRIPTS:
            patch.install()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for patch in SCRIPTS:
            patch.remove()
        MODES.items.pop()

    @uncompiled(UNCOMPILED)
    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch calls all modes of a thread, the innermost first: the outer one would round a second time.
        if self is not MODES.items[-1] or not self._rounds:
            return func(*args, **kwargs)
        # The overloads of an operator are named "mm.default" and "mm.out".
        name = getattr(func, "__name__", "").partition(".")[0]
        # Autocast would cast what is emulated: FP16 tensors are not.
        return without_autocast(autocast_devices(floating(args, kwargs)), self._run, (name, func, args, kwargs), {})

    def _run(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function by the rule that its name is listed under."""
        if name in PRODUCTS or name in EMBEDDINGS or (name in HALF and self._elementwise):
            return self._product(name, func, args, kwargs)
        if name.endswith("_") and name[:-1] in PRODUCTS:
            return self._product_in_place(name[:-1], args, kwargs)
        if name == "multi_head_attention_forward":  # has several products, each of which is rounded
            # torch disables a mode while its `__torch_function__` runs: entered again, it sees the calls inside.
            with self:
                return _decomposed(func)(*args, **kwargs)
        if not self._elementwise or name in FLOAT32:
            return func(*args, **kwargs)
        return self._promote(name, func, args, kwargs)

    def run_script(self, script: Any, call: Function, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the call of a TorchScript function.

        Rounds the result as that of one function: a fused kernel rounds at its end, too. The operations themselves are
        not seen, so that those with products are refused.
        """
        if not self._rounds:
            return call(*args, **kwargs)
        names = operations(script)
        refused = PRODUCTS | EMBEDDINGS
        if products := sorted(name for name in names if name.removesuffix("_") in refused):
            raise RuntimeError(
                "`emulate` cannot round inside TorchScript, whose products would run in float32. "
                f"Received: a scripted or traced function with {', '.join(products[:5])}. Run the Python function, for "
                'all scripts by PYTORCH_JIT=0, or leave it in float32 with `with emulate("fp32"):` around it.'
            )
        # Not called by torch, which would disable the mode: rounding must not be rounded.
        with torch._C.DisableTorchFunction():
            if not self._elementwise or not FLOAT32.isdisjoint(names):
                return call(*args, **kwargs)
            return self._promote("", call, args, kwargs)

    def _product(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the product of rounded operands, rounded."""
        count = 3 if name == "scaled_dot_product_attention" else len(args)  # the next one is a mask
        operands = [map_tensors(arg, self._round_operand) for arg in args[:count]]
        named = {
            key: arg if key in NOT_OPERANDS else map_tensors(arg, self._round_operand) for key, arg in kwargs.items()
        }
        # The result may be `out`, the caller's tensor: all of it has just been written, and may be rounded.
        result = func(*operands, *args[count:], **named)
        return map_tensors(result, partial(self._round_result, low=name not in EMBEDDINGS))

    def _product_in_place(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Puts the product of rounded operands, rounded, into the first of them, and returns that."""
        # `copy_`, which autograd records: the gradient of the tensor from before goes through the product.
        target = args[0].copy_(self._product(name, getattr(Tensor, name), args, kwargs))
        return self._marked(target) if _is_emulated(target) else target

    def _round_operand(self, tensor: Tensor) -> Tensor:
        """Returns an operand of a product, rounded unless it is so already. Its gradient is rounded in any case."""
        # A parameter is rounded at every use. A cache, as autocast has for its casts, would have to know when it
        # changes, and fused optimizers change parameters without raising their version.
        if not _is_emulated(tensor):
            return tensor
        if self._is_low(tensor):
            # A view: the hook is for this use, and the gradient of every use is rounded before they are summed.
            return round_grads(tensor.view_as(tensor), self._grads)
        return round_copy(tensor, self._values, self._grads)

    def _round_result(self, tensor: Tensor, low: bool = True) -> Tensor:
        """Rounds a result in place, marks it as low precision if `low`, and returns it."""
        if not _is_emulated(tensor):
            return tensor
        rounded = round_result(tensor, self._values, self._grads)
        return self._marked(rounded) if low else rounded

    def _promote(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function, rounded where autocast would compute it in FP16 or BF16.

        That is where all tensors in the arguments are low precision. As in torch's type promotion, a tensor without
        dimensions does not count beside one with.
        """
        # As in torch's type promotion, `out` has no part in it: it takes the result.
        all_inputs = (*args, *(value for key, value in kwargs.items() if key != "out"))
        deciding = args[:1] if name in LIKE_FIRST else all_inputs
        given = [tensor for tensor in tensors_in(deciding) if _is_emulated(tensor)]
        low = [tensor for tensor in given if self._is_low(tensor)]
        if not low:
            return func(*args, **kwargs)
        is_like_second = name in LIKE_SECOND and len(given) == 2
        if is_like_second and self._is_low(given[1]):
            result = func(*args, **kwargs)
            return result if self._is_low(result) else self._marked(self._round_operand(result))
        if is_like_second or name == "float" or any(arg is torch.float32 for arg in (*args, *kwargs.values())):
            return map_tensors(func(*args, **kwargs), lambda tensor: tensor.view_as(tensor))  # a view has no mark
        promoted = [tensor for tensor in given if tensor.dim()] or given
        # Before the call, which may change a tensor in place and so remove its mark. `__get__` reads a property.
        rounds = name != "__get__" and all(self._is_low(tensor) for tensor in promoted)
        result = func(*args, **kwargs)
        for tensor in low:
            if not self._is_low(tensor):  # the function changed it in place
                self._round_result(tensor)
        return map_tensors(result, partial(self._promoted, given, rounds))

    def _promoted(self, given: Sequence[Tensor], rounds: bool, tensor: Tensor) -> Tensor:
        """Returns a result of a function with low-precision tensors among its arguments."""
        if not _is_emulated(tensor) or self._is_low(tensor):
            return tensor
        # A view of a rounded tensor is rounded already, and rounding it in place would change the other tensor.
        # Inside transforms of `torch.func`, whose tensors do not show their storage, nothing counts as a view.
        if shared := [other for other in given if torch._C._is_alias_of(tensor, other)]:  # type: ignore[attr-defined]
            return self._marked(tensor) if self._is_low(shared[0]) else tensor
        return self._round_result(tensor) if rounds else tensor

    def _marked(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as low precision, and returns it."""
        setattr(tensor, MARK, self._mark(tensor))
        return tensor

    def _is_low(self, tensor: Tensor) -> bool:
        return getattr(tensor, MARK, None) == self._mark(tensor)

    def _mark(self, tensor: Tensor) -> tuple[object, int | None]:
        # A change in place changes the version, and the tensor counts as float32 again. Inference tensors have none.
        return self._block, None if tensor.is_inference() else tensor._version


def _scripted(script: Any, call: Function) -> Function:
    """Returns the call of a script in the innermost block of this thread; the call itself where there is none."""
    return partial(MODES.items[-1].run_script, script, call) if MODES.items else call


SCRIPT_HANDLERS.append(_scripted)


def _is_emulated(tensor: Tensor) -> bool:
    """Returns whether emulation applies to a tensor: not to float64, integer and sparse tensors."""
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


@cache
def _decomposed(func: FunctionType) -> FunctionType:
    """Returns a Python function of torch that runs its body, and so calls its operations, inside the mode."""
    # Such a function first calls `has_torch_function`, which is True in any mode, and would call the mode again without
    # end. A copy of the function, with another global of that name, does not change torch for other code.
    names = func.__globals__ | {"has_torch_function": lambda tensors: False}
    decomposed = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    decomposed.__kwdefaults__ = func.__kwdefaults__
    return decomposed
