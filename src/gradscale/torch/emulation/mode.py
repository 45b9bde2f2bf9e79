"""The mode that rounds around each torch function that is called inside an `emulate` block.

In FP16 and BF16 it follows which float32 tensors hold numbers of the format, and would be of that dtype under autocast.
The lists of functions are those of `torch.autocast` on CUDA, with the losses of its list for the CPU and embeddings, by
name, since a function has many aliases: `torch.matmul`, `Tensor.matmul`, `@`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from functools import cache, partial
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscale.formats import BF16, FP16, FP32, Format
from gradscale.kernels.torch_rounding import Rounding, round_copy, round_grads, round_result
from gradscale.torch.cast import map_tensors, tensors_in
from gradscale.torch.casting import autocast_device, floating, without_autocast
from gradscale.torch.casting.catching import Function, PerThread
from gradscale.torch.compat import uncompiled

MARK = "_gradscale_low_precision"
"""The attribute that marks tensors with numbers of the format. It refers to no tensor, and so keeps nothing alive. A
set of ids would not do: the id of a tensor is reused once it is freed."""

MODES = PerThread()
"""The blocks that a thread is in, the innermost last, and None while one of them runs a function."""

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


class EmulationMode(TorchFunctionMode, ContextDecorator):
    """Rounds operands and results of products, and results of other functions where autocast would."""

    def __init__(self, values: Rounding, grads: Rounding) -> None:
        super().__init__()
        self._values, self._grads = values, grads
        self._rounds = (values.format, grads.format) != (FP32, FP32)
        # Formats in which torch also computes element by element. In the others no machine does: only products use
        # them, and everything between is float32.
        self._elementwise = values.format in (FP16, BF16)

    def __enter__(self) -> Self:
        MODES.items.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        MODES.items.pop()

    @uncompiled("`gradscale.torch.emulate` runs uncompiled. Leave out `fullgraph`.")
    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self is not MODES.items[-1] or not self._rounds:
            return func(*args, **kwargs)
        # The overloads of an operator are named "mm.default" and "mm.out".
        name = getattr(func, "__name__", "").partition(".")[0]
        # Autocast would cast what is emulated: FP16 tensors are not.
        autocast = autocast_device(floating(args, kwargs))
        # torch calls the modes of outer blocks next, which would round a second time.
        MODES.items.append(None)
        try:
            return without_autocast(autocast, self._run, (name, func, args, kwargs), {})
        finally:
            MODES.items.pop()

    def _run(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function by the rule that its name is listed under."""
        # Autocast computes `prelu` in half precision even of float32 arguments, though element by element.
        if name in PRODUCTS or name in EMBEDDINGS or (name == "prelu" and self._elementwise):
            return self._product(name, func, args, kwargs)
        if name.endswith("_") and name[:-1] in PRODUCTS:
            # `copy_`, which autograd records: the gradient of the tensor from before goes through the product.
            target = args[0].copy_(self._product(name[:-1], getattr(Tensor, name[:-1]), args, kwargs))
            return _map_emulated(target, self._marked)
        if name == "multi_head_attention_forward":  # has several products, each of which is rounded
            # torch disables a mode while its `__torch_function__` runs: entered again, it sees the calls inside.
            with self:
                return _decomposed(func)(*args, **kwargs)
        if not self._elementwise or name in FLOAT32:
            return func(*args, **kwargs)
        return self._promote(name, func, args, kwargs)

    def _product(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the product of rounded operands, rounded."""
        # A mask has -inf, which not every format has, and `out` is no operand.
        count = 3 if name == "scaled_dot_product_attention" else len(args)
        named = {key: arg for key, arg in kwargs.items() if key not in ("attn_mask", "out")}
        operands, named = _map_emulated((tuple(args[:count]), named), self._round_operand)
        # The result may be `out`, the caller's tensor: all of it has just been written, and may be rounded.
        result = func(*operands, *args[count:], **{**kwargs, **named})
        return _map_emulated(result, partial(self._round_result, low=name not in EMBEDDINGS))

    def _round_operand(self, tensor: Tensor) -> Tensor:
        """Returns an operand of a product, rounded unless it is so already. Its gradient is rounded in any case."""
        # A parameter is rounded at every use. A cache, as autocast has for its casts, would have to know when it
        # changes, and fused optimizers change parameters without raising their version.
        if self._is_low(tensor):
            # A view: the hook is for this use, and the gradient of every use is rounded before they are summed.
            return round_grads(tensor.view_as(tensor), self._grads)
        return round_copy(tensor, self._values, self._grads)

    def _round_result(self, tensor: Tensor, low: bool = True) -> Tensor:
        """Rounds a result in place, marks it as low precision if `low`, and returns it."""
        rounded = round_result(tensor, self._values, self._grads)
        return self._marked(rounded) if low else rounded

    def _promote(self, name: str, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function, rounded where autocast would compute it in the format.

        That is where all tensors in the arguments are low precision, but for those without dimensions beside others.
        """
        # `out` has no part in it, since it takes the result, nor have parameters of norms, which are always float32.
        inputs = (*args, *(value for key, value in kwargs.items() if key != "out"))
        deciding = args[:1] if name in ("batch_norm", "instance_norm") else inputs
        given = [tensor for tensor in tensors_in(deciding) if _is_emulated(tensor)]
        low = [tensor for tensor in given if self._is_low(tensor)]
        if not low:
            return func(*args, **kwargs)
        is_like_second = name in ("to", "type_as") and len(given) == 2
        if is_like_second and self._is_low(given[1]):
            result = func(*args, **kwargs)
            return result if self._is_low(result) else self._marked(self._round_operand(result))
        if is_like_second or name == "float" or any(arg is torch.float32 for arg in (*args, *kwargs.values())):
            return map_tensors(func(*args, **kwargs), lambda tensor: tensor.view_as(tensor))  # a view has no mark
        counted = [tensor for tensor in given if tensor.dim()] or given
        # Before the call, which may change a tensor in place and so remove its mark. `__get__` reads a property.
        rounds = name != "__get__" and all(self._is_low(tensor) for tensor in counted)
        result = func(*args, **kwargs)
        for tensor in low:
            if not self._is_low(tensor):  # the function changed it in place
                self._round_result(tensor)

        def promoted(tensor: Tensor) -> Tensor:
            if self._is_low(tensor):
                return tensor
            # A view of a rounded tensor is rounded already, and rounding it in place would change the other tensor.
            # Inside transforms of `torch.func`, whose tensors do not show their storage, nothing counts as a view.
            views = [other for other in given if torch._C._is_alias_of(tensor, other)]  # type: ignore[attr-defined]
            if views:
                return self._marked(tensor) if self._is_low(views[0]) else tensor
            return self._round_result(tensor) if rounds else tensor

        return _map_emulated(result, promoted)

    def _marked(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as low precision, and returns it."""
        setattr(tensor, MARK, self._mark(tensor))
        return tensor

    def _is_low(self, tensor: Tensor) -> bool:
        return getattr(tensor, MARK, None) == self._mark(tensor)

    def _mark(self, tensor: Tensor) -> tuple[Format, int | None]:
        # A change in place changes the version, and the tensor counts as float32 again. Inference tensors have none.
        return self._values.format, None if tensor.is_inference() else tensor._version


def _is_emulated(tensor: Tensor) -> bool:
    """Returns whether emulation applies to a tensor: not to float64, integer and sparse tensors."""
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


def _map_emulated(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with every tensor in it changed that emulation applies to."""
    return map_tensors(value, lambda tensor: change(tensor) if _is_emulated(tensor) else tensor)


@cache
def _decomposed(func: FunctionType) -> FunctionType:
    """Returns a Python function of torch that runs its body, and so calls its operations, inside the mode."""
    # Such a function first calls `has_torch_function`, which is True in any mode, and would call the mode again without
    # end. A copy of the function, with another global of that name, does not change torch for other code.
    names = func.__globals__ | {"has_torch_function": lambda tensors: False}
    decomposed = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    decomposed.__kwdefaults__ = func.__kwdefaults__
    return decomposed
