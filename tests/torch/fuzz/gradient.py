"""Gradients of the reference: unscaled, in float64, as they are once a dtype has held them scaled."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tests.torch.fuzz.model import poison
from tests.torch.fuzz.operations import Batch
from tests.torch.fuzz.setup import DTYPES, HALF, WIDTH, Parameter
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


@dataclass
class Gradient:
    """An unscaled gradient.

    Attributes:
        values: in float64 or complex128, dense.
        rows: the rows that a sparse gradient has entries for; None for a dense one.
        clipped: whether a part of it was multiplied by a factor that is no power of two.
    """

    values: Tensor
    rows: set[int] | None = None
    clipped: bool = False

    @property
    def held(self) -> Tensor:
        """The numbers that a gradient of torch would hold: of a sparse one, those of its rows."""
        return self.values if self.rows is None else self.values[sorted(self.rows)]

    @property
    def parts(self) -> Tensor:
        """The same as real numbers: complex ones count as two."""
        held = self.held
        return torch.view_as_real(held) if held.is_complex() else held

    @property
    def finite(self) -> bool:
        """Whether no element is inf or NaN."""
        return bool(torch.isfinite(self.parts).all())

    @property
    def kind(self) -> str:
        """`"nan"` if an element is, else `"inf"`."""
        return "nan" if bool(torch.isnan(self.parts).any()) else "inf"

    @property
    def bad_elements(self) -> int:
        """How many elements are not finite; a complex one counts once."""
        return int((~torch.isfinite(self.held)).sum())

    @property
    def amax(self) -> float:
        """The largest magnitude of any part."""
        return float(self.parts.abs().max()) if self.parts.numel() else 0.0

    @property
    def squares(self) -> float:
        """The sum of squares."""
        return float(self.parts.square().sum())

    def poison(self, index: int, value: float) -> None:
        """Sets one element, of a sparse gradient in its first row; does nothing to an empty one."""
        if self.rows is None:
            poison(self.values, index, value)
        elif self.rows:
            poison(self.values[min(self.rows)], index, value)

    def as_torch(self, dtype: torch.dtype) -> Tensor:
        """Returns the gradient as an optimizer takes it."""
        values = self.values.to(dtype)
        if self.rows is None:
            return values
        rows = torch.tensor(sorted(self.rows), dtype=torch.int64)
        return torch.sparse_coo_tensor(
            rows[None], values[rows], values.shape, is_coalesced=True, check_invariants=False
        )


def rounded(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns unscaled values as they are once `dtype` has held them times `scale`: beyond its range they are inf."""
    if values.is_complex():
        return torch.view_as_complex(rounded(torch.view_as_real(values), scale, dtype.to_real()))
    return (values * scale).to(dtype).double() / scale


def times(values: Tensor, factor: float) -> Tensor:
    """Returns values times a real factor. A complex product would make NaN of the other part of an inf."""
    return torch.view_as_complex(torch.view_as_real(values) * factor) if values.is_complex() else values * factor


def clamped(values: Tensor, bound: float) -> Tensor:
    """Returns every element between -bound and bound; of a complex one, each of its two parts."""
    if values.is_complex():
        return torch.view_as_complex(torch.view_as_real(values).clamp(-bound, bound))
    return values.clamp(-bound, bound)


def made(parameter: Parameter, batch: Batch, scale: float, dtype: torch.dtype) -> Gradient:
    """Returns the gradient that the backward pass of a batch makes at a scale, in `dtype`."""
    # A 16-bit parameter has 16-bit gradients at first, also where they are accumulated in float32.
    narrow = [torch.float16] * parameter.through_half + [DTYPES[parameter.dtype]] * (parameter.dtype in HALF)
    values = batch.coefficients(parameter)
    rows = batch.rows(parameter) if parameter.sparse else None
    entries = values if rows is None else values[rows]
    entries = times(entries, batch.loss_factor)
    for each in [*narrow, dtype]:
        entries = rounded(entries, scale, each)
    for fault in batch.faults:
        if fault.parameter == parameter.name:
            poison(entries, fault.index, _held(fault.value, DTYPES[parameter.dtype]) / scale)
    if rows is None:
        return Gradient(entries)
    summed = torch.zeros_like(values).index_add_(0, torch.tensor(rows, dtype=torch.int64), entries)
    return Gradient(summed.reshape(parameter.size, WIDTH), set(rows))


def _held(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype.to_real() if dtype.is_complex else dtype))


def added(one: Gradient | None, other: Gradient, scale: float, dtype: torch.dtype) -> Gradient:
    """Returns the sum that autograd accumulates in `dtype` at a scale."""
    if one is None:
        return Gradient(rounded(other.values, scale, dtype), other.rows)
    rows = None if one.rows is None or other.rows is None else one.rows | other.rows
    return Gradient(rounded(one.values + other.values, scale, dtype), rows, one.clipped)


def amax_of(gradients: Iterable[Gradient], scale: float) -> float:
    """Returns the largest magnitude, as it is measured on scaled gradients: a finite float64 is at most a float32."""
    largest = max((gradient.amax for gradient in gradients), default=0.0)
    measured = min(largest * scale, LARGEST) / scale if largest < torch.inf else torch.inf
    return measured if measured <= LARGEST else torch.inf


def norm_of(gradients: Iterable[Gradient], divisor: float = 1.0) -> float:
    """Returns the norm of gradients times `divisor`; inf where the squares exceed float32, in which they are summed."""
    squares = [gradient.squares * divisor**2 for gradient in gradients]
    total = sum(squares)
    return torch.inf if total > LARGEST else total**0.5
