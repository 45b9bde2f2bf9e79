"""Operations that emulation is compared with autocast on, and how they are run and compared."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradscale.formats import Format
from gradscale.kernels.torch_rounding import Rounding

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Operation:
    """A function of float32 operands, and their shapes."""

    run: Callable[..., Tensor]
    shapes: Shapes

    def results(self, context: AbstractContextManager[object]) -> list[Tensor]:
        """Returns what comes out in the context, and the gradient of each operand, all as float32."""
        generator = torch.Generator().manual_seed(0)
        operands = [torch.randn(shape, generator=generator).requires_grad_() for shape in self.shapes]
        with context:
            result = self.run(*operands)
        grad = torch.randn(result.shape, generator=generator).to(result.dtype)
        return [result.detach().float(), *torch.autograd.grad(result, operands, grad)]


SUMS = {
    "linear": Operation(F.linear, ((5, 24), (7, 24), (7,))),
    "matmul": Operation(torch.matmul, ((5, 24), (24, 7))),
    "matmul method": Operation(lambda a, b: a.matmul(b), ((5, 24), (24, 7))),
    "matmul operator": Operation(lambda a, b: a @ b, ((5, 24), (24, 7))),
    "mm": Operation(torch.mm, ((5, 24), (24, 7))),
    "bmm": Operation(torch.bmm, ((3, 5, 24), (3, 24, 7))),
    "addmm": Operation(torch.addmm, ((5, 7), (5, 24), (24, 7))),
    "baddbmm": Operation(torch.baddbmm, ((3, 5, 7), (3, 5, 24), (3, 24, 7))),
    "inner": Operation(torch.inner, ((5, 24), (7, 24))),
    "einsum": Operation(lambda a, b: torch.einsum("bik,bjk->bij", a, b), ((3, 5, 24), (3, 7, 24))),
}
"""Products whose sums autocast computes in float32 on a CPU, too."""

OTHERS = {
    "vecdot": Operation(torch.linalg.vecdot, ((5, 24), (5, 24))),
    "addbmm": Operation(torch.addbmm, ((5, 7), (3, 5, 24), (3, 24, 7))),
    "conv1d": Operation(F.conv1d, ((2, 4, 9), (6, 4, 3), (6,))),
    "conv2d": Operation(F.conv2d, ((2, 4, 9, 9), (6, 4, 3, 3), (6,))),
    "conv3d": Operation(F.conv3d, ((2, 3, 5, 5, 5), (4, 3, 3, 3, 3), (4,))),
    "conv_transpose1d": Operation(F.conv_transpose1d, ((2, 4, 9), (4, 6, 3), (6,))),
    "conv_transpose2d": Operation(F.conv_transpose2d, ((2, 4, 6, 6), (4, 6, 3, 3), (6,))),
    "conv_transpose3d": Operation(F.conv_transpose3d, ((2, 3, 4, 4, 4), (3, 4, 3, 3, 3), (4,))),
    "scaled_dot_product_attention": Operation(F.scaled_dot_product_attention, ((2, 3, 6, 8),) * 3),
    "prelu": Operation(F.prelu, ((5, 24), (24,))),
    "an operator of torch.ops": Operation(torch.ops.aten.mm.default, ((5, 24), (24, 7))),
    "causal attention": Operation(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((2, 3, 6, 8),) * 3
    ),
}
"""Products some of whose sums autocast computes in FP16 on a CPU: those are as far from float32 as from emulation."""

PRODUCTS = SUMS | OTHERS

LAYERS = {
    "GELU after a product": Operation(lambda x, w: F.gelu(F.linear(x, w)), ((5, 24), (7, 24))),
    "ReLU in place after a product": Operation(lambda x, w: F.linear(x, w).relu_(), ((5, 24), (7, 24))),
    "sum of two products": Operation(lambda x, w, v: F.linear(x, w) + F.linear(x, v), ((5, 24), (7, 24), (7, 24))),
    "product plus float32": Operation(lambda x, w, b: F.linear(x, w) + b, ((5, 24), (7, 24), (5, 7))),
    "product times a number": Operation(lambda x, w: F.linear(x, w) * 0.3, ((5, 24), (7, 24))),
    "softmax of a product": Operation(lambda x, w: F.linear(x, w).softmax(-1), ((5, 24), (7, 24))),
    "LayerNorm of a product": Operation(lambda x, w: F.layer_norm(F.linear(x, w), (7,)), ((5, 24), (7, 24))),
    "BatchNorm of a convolution": Operation(
        lambda x, w, g, b: F.batch_norm(F.conv1d(x, w), None, None, g, b, training=True),
        ((4, 3, 9), (6, 3, 3), (6,), (6,)),
    ),
    "pooled convolution": Operation(lambda x, w: F.max_pool1d(F.conv1d(x, w), 2), ((4, 3, 9), (6, 3, 3))),
    "two products": Operation(lambda x, w, v: F.linear(F.linear(x, w).tanh(), v), ((5, 24), (7, 24), (9, 7))),
    "concatenated products": Operation(
        lambda x, w, v: torch.cat([F.linear(x, w), F.linear(x, v)], 1).square(), ((5, 24), (7, 24), (7, 24))
    ),
    "embedding": Operation(
        lambda table, w: F.linear(F.embedding(torch.tensor([1, 3, 1]), table), w), ((5, 24), (7, 24))
    ),
}
"""Products with what follows them."""


def steps_apart(one: Tensor, other: Tensor, known: Format) -> Tensor:
    """Returns how many numbers of the format lie between two, element by element; fractions are beside a number."""
    larger = torch.maximum(one.abs(), other.abs()).clamp_min(known.smallest_normal).double()
    step = torch.exp2(torch.floor(torch.log2(larger))) * 2.0**-known.mantissa_bits
    return (one.double() - other).abs() / step


def are_of(tensor: Tensor, known: Format) -> bool:
    """Returns whether all values are numbers of the format."""
    return torch.equal(Rounding(known).round_(tensor.detach().clone()), tensor.detach())


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference, relative to that of what was expected."""
    return float((found - expected).double().norm() / expected.double().norm().clamp_min(1e-12))
