"""The model of both interpreters: its loss is linear in its parameters, so that every gradient is known."""

from typing import Any

import torch
from tests.torch.fuzz.operations import Batch
from tests.torch.fuzz.setup import DTYPES, WIDTH, Parameter, Setup
from torch import Tensor, nn


def initial(parameter: Parameter) -> Tensor:
    """Returns the first value of a parameter: small whole numbers, which every dtype holds."""
    values = torch.arange(parameter.size * (WIDTH if parameter.sparse else 1), dtype=torch.float64) % 5 - 2
    if parameter.is_complex:
        values = torch.complex(values, 1 - values)
    return values.reshape(parameter.shape).to(DTYPES[parameter.dtype])


class _Poisoned(torch.autograd.Function):
    """Returns its input; sets one element of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: int, value: float) -> Tensor:  # type: ignore[override]
        ctx.index, ctx.value = index, value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        grad = grad.clone()
        poison(grad, ctx.index, ctx.value)
        return grad, None, None


def poison(grad: Tensor, index: int, value: float) -> None:
    """Sets one element of a gradient, of a sparse one one of its values; does nothing to an empty one."""
    values = grad._values() if grad.is_sparse else grad
    if values.numel():
        values.view(-1)[index % values.numel()] = value


class Model(nn.Module):
    """A model whose loss is linear in its parameters: the gradients are the coefficients of the batch."""

    total: Tensor
    batches: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        for parameter in setup.parameters:
            value = nn.Parameter(initial(parameter), requires_grad=parameter.trained)
            self.register_parameter(parameter.name, value)
        if setup.tied is not None:
            self.register_parameter("tied", self.get_parameter(setup.tied))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch) -> Tensor:
        """Returns the loss of a `Batch`, and updates the buffers in training, as BatchNorm does."""
        if self.training:
            self.total += batch.seen
            self.batches += 1
        terms = [self._term(name, batch) for name in batch.parameters]
        loss = torch.stack(terms).sum().to(DTYPES[self.setup.loss_dtype])
        return loss * batch.loss_factor + batch.loss_offset

    def _term(self, name: str, batch: Batch) -> Tensor:
        parameter, tensor = self.setup.parameter(name), self.get_parameter(name)
        coefficients = batch.coefficients(parameter)
        for fault in batch.faults:
            if fault.parameter == name:
                tensor = _Poisoned.apply(tensor, fault.index, fault.value)  # type: ignore[assignment]
        if parameter.sparse:
            rows = torch.tensor(batch.rows(parameter), dtype=torch.int64)
            tensor, coefficients = nn.functional.embedding(rows, tensor, sparse=True), coefficients[rows]
        if parameter.through_half:
            tensor = tensor.half()
        if parameter.is_complex:
            return (tensor * coefficients.to(tensor.dtype).conj()).real.sum().float()
        wide = torch.float64 if parameter.dtype == "float64" else torch.float32
        return (tensor.to(wide) * coefficients.to(wide)).sum().float()
