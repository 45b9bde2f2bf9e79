"""Kernels on lists of dense torch tensors: groups for multi-tensor kernels, norms, largest magnitudes, shares."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.engine.measurement import LARGEST_NORM
from gradscale.formats import FP32

CPU = torch.device("cpu")

DOT_FROM = 32_768
"""Elements from which `dot` beats the multi-tensor norm on CPU: below, its call costs more than its loop saves."""

CAST_AT_ONCE = 262_144
"""Elements of a 16-bit gradient that are cast to float32 together: they stay in the cache until they are multiplied."""


class TensorGroup(NamedTuple):
    """Tensors of one device and type.

    Attributes:
        device: where they are.
        dtype: their type, a real one.
        positions: which of all the tensors they are.
        tensors: the tensors; of complex ones, the two parts as one real view.
    """

    device: torch.device
    dtype: torch.dtype
    positions: Sequence[int]
    tensors: list[Tensor]


def tensor_groups(tensors: Sequence[Tensor]) -> list[TensorGroup]:
    """Returns the tensors by device and type."""
    # Nearly always all have the same. A set shows that in a fraction of the time that sorting takes.
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(kinds) == 1 and not (kind := kinds.pop())[1].is_complex:
        return [TensorGroup(*kind, range(len(tensors)), list(tensors))]
    return list(_sorted([as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]))


def _sorted(tensors: Sequence[Tensor]) -> Iterator[TensorGroup]:
    found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault((tensor.device, tensor.dtype), []).append(position)
    for (device, dtype), positions in found.items():
        yield TensorGroup(device, dtype, positions, [tensors[position] for position in positions])


def as_real(tensor: Tensor) -> Tensor:
    """Returns the two parts of a complex tensor as one real view; of a lazy conjugate, the parts of its original.

    Magnitudes, finiteness, clamping and multiplying by a real number are the same for both.
    """
    # `view_as_real` rejects a lazy conjugate, and `resolve_conj` would copy it: writes would not reach the gradient.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def of_all(kernel: Callable[[TensorGroup], Tensor]) -> Callable[[Sequence[Tensor], torch.device], Tensor]:
    """Returns a function of tensors and a device that has the numbers `kernel` finds in each of them, in their order.

    On that device, in float32, or in float64 where one of the tensors is.
    """

    @wraps(kernel)
    def found(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.float32, device=device)
        groups = tensor_groups(tensors)
        # Only gradients made with `create_graph` have a graph. `no_grad` would take as long as a small kernel.
        sizes = [kernel(group).detach().to(device) for group in groups]
        if len(groups) == 1:
            return sizes[0]
        # Float64 sizes stay: a finite one that does not fit float32 would be inf there.
        wide = torch.float64 if torch.float64 in [group.dtype for group in groups] else torch.float32
        placed = {
            position: size
            for group, vector in zip(groups, sizes, strict=True)
            for position, size in zip(group.positions, vector.to(wide).unbind(), strict=True)
        }
        return torch.stack([placed[position] for position in range(len(placed))])

    return found


@of_all
def norms(group: TensorGroup) -> Tensor:
    """Returns the norm of each tensor. Does not synchronize with the device.

    A NaN makes a norm NaN; an inf makes it inf, and so does a finite float32 element above 1.8e19, whose square is inf.
    FP16 and BF16 tensors accumulate in float32. Reads each tensor once, and makes no temporary larger than one number
    per tensor, and `CAST_AT_ONCE` of them.
    """
    # A `dot` for a large flat tensor, a multi-tensor norm for the rest: on 25M float32 elements `dot` takes two thirds
    # of the time of `_foreach_norm`. It is for float32 only: in FP16 its sum overflows from 65520 on. `_foreach_norm`
    # sums in the dtype it is given, whatever the tensors' own.
    if group.device.type == "cpu" and group.dtype is not torch.float64:
        large = [grad.numel() >= DOT_FROM for grad in group.tensors]
        if any(large):
            return _norms_by_size(group.tensors, large)
    wide = torch.float64 if group.dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(group.tensors, 2, dtype=wide))  # pyright: ignore[reportPrivateImportUsage]


@of_all
def largest(group: TensorGroup) -> Tensor:
    """Returns the largest magnitude in each tensor: NaN where there is one, else inf.

    An empty tensor has 0. Reads each tensor once, and does not synchronize with the device.
    """
    tensors = group.tensors
    if 0 in map(Tensor.numel, tensors):  # for which the kernels raise
        tensors = [grad if grad.numel() else grad.new_zeros(1) for grad in tensors]
    wide = torch.float64 if group.dtype is torch.float64 else torch.float32
    # `_foreach_max` alone would miss -inf.
    if group.device.type == "cpu":
        # `aminmax` carries NaN, makes no copy as `abs` would, and is ten times as fast here as `_foreach_norm`.
        extremes = [extreme for pair in map(torch.aminmax, tensors) for extreme in pair]
        return torch.linalg.vector_norm(torch.stack(extremes).view(-1, 2), math.inf, 1, dtype=wide)
    # On an accelerator one launch for all of them.
    return torch.stack(torch._foreach_norm(tensors, math.inf, dtype=wide))  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def share_above(
    gradients: Sequence[Tensor], edge: Tensor, device: torch.device, weights: Sequence[float] | None = None
) -> Tensor:
    """Returns the share of all gradient elements whose magnitude is above `edge`; inf and NaN are.

    Complex elements count as two, and those of a gradient times its weight, by default 1. Reads each gradient once and
    makes temporaries as large as the largest of them.
    """
    groups = tensor_groups(gradients)
    real = [tensor for group in groups for tensor in group.tensors]
    factors = [1.0 if weights is None else weights[position] for group in groups for position in group.positions]
    # Compared in float32: a narrower type would round the edge. Negated, so that NaN counts as above.
    wide = (grad.float() if grad.dtype.itemsize < 4 else grad for grad in real)
    above = [
        (~(grad.abs() <= edge.to(grad.device))).sum().to(device, torch.float32) * factor
        for grad, factor in zip(wide, factors, strict=True)
    ]
    elements = sum(grad.numel() * factor for grad, factor in zip(real, factors, strict=True))
    return torch.stack(above).sum() / (elements or 1.0) if above else torch.zeros_like(edge)


def single(size: Tensor) -> Tensor:
    """Returns a size in float32, as rules need it: the largest float32 for a finite float64 that does not fit."""
    if size.dtype is not torch.float64:
        return size
    return torch.where(torch.isfinite(size), size.clamp(max=FP32.max), size).float()


def single_norm(norm: Tensor) -> Tensor:
    """Returns a norm in float32: inf where its square does not fit, also of float64 tensors. NaN stays NaN."""
    return norm if norm.dtype is not torch.float64 else torch.where(norm >= LARGEST_NORM, torch.inf, norm).float()


def _norms_by_size(gradients: Sequence[Tensor], large: Sequence[bool]) -> Tensor:
    # A transposed gradient cannot be viewed as flat, and flattening would copy it.
    dotted = [is_large and grad.is_contiguous() for grad, is_large in zip(gradients, large, strict=True)]
    flat = [grad.view(-1) for grad, is_dotted in zip(gradients, dotted, strict=True) if is_dotted]
    norms = torch.stack(_squared(flat)).sqrt_() if flat else torch.zeros(0)
    if len(flat) == len(gradients):
        return norms
    rest = [grad for grad, is_dotted in zip(gradients, dotted, strict=True) if not is_dotted]
    by_dot, multi_tensor = iter(norms.unbind()), iter(torch._foreach_norm(rest, 2, dtype=torch.float32))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([next(by_dot if is_dotted else multi_tensor) for is_dotted in dotted])


def _squared(flat: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sum of squares of each flat gradient, all of one type, in float32."""
    if flat[0].dtype is torch.float32:
        return [torch.dot(grad, grad) for grad in flat]
    # One buffer for all: a cast of each gradient would allocate as much memory again, and read it from RAM.
    most = min(CAST_AT_ONCE, max(grad.numel() for grad in flat))
    buffer = torch.empty(most, dtype=torch.float32, device=flat[0].device)
    return [_squared_in(buffer, grad) for grad in flat]


def _squared_in(buffer: Tensor, grad: Tensor) -> Tensor:
    """Returns the sum of squares of a flat 16-bit gradient, which is cast to float32 in `buffer`, piece by piece."""
    if grad.numel() > buffer.numel():
        return torch.stack([_squared_in(buffer, piece) for piece in grad.split(buffer.numel())]).sum()
    cast = buffer[: grad.numel()].copy_(grad)
    return torch.dot(cast, cast)
