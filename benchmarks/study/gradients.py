"""The gradients that a format would have to hold, computed without rounding them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradscale import FP16, FP32, Format
from gradscale.torch import emulate
from gradscale.torch.emulation.mode import MARK

ROUNDED = (nn.Linear, nn.Conv2d, nn.Embedding)
"""Modules whose products run in low precision."""


Call = tuple[nn.Module, tuple[Tensor, ...], Tensor]
"""A module, its inputs and its output."""


@dataclass(frozen=True)
class Gradients:
    """The gradients that are rounded, of one backward pass; unscaled, in float32.

    Attributes:
        tensors: of outputs and weights.
        biases: of biases. They may overflow, but those before a BatchNorm are noise, of which nothing can be lost.
        between: of all else that is computed in FP16, such as logits that are divided by a temperature, and a loss that
            is not float32: its gradient is the scale. They may overflow.
    """

    tensors: list[Tensor]
    biases: list[Tensor]
    between: list[Tensor] = field(default_factory=list)

    @property
    def amax(self) -> float:
        """The largest of them; NaN if one is, and 0 if there is none."""
        tensors = (*self.tensors, *self.biases, *self.between)
        return float(torch.stack([tensor.abs().max() for tensor in tensors]).max()) if tensors else 0.0

    def lost(self, format: Format, scale: float) -> float:
        """Returns the share of a tensor's energy (the sum of squares) that becomes zero, as a mean over tensors."""
        shares = [_lost(tensor.double(), format.smallest_subnormal / 2 / scale) for tensor in self.tensors]
        return sum(shares) / len(shares)


class Kept(TorchFunctionMode):
    """Inside a block of `emulate`, keeps the results of functions that are computed in FP16.

    Attributes:
        results: in the order in which they were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and result.numel() and hasattr(result, MARK):
            self.results.append(result)
        return result


def exact_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> Gradients:
    """Returns the gradients, with the model computed in FP16. Leaves `.grad` and the buffers of the model alone.

    A weight that is used twice has a gradient of each use, since each is rounded before they are added. A frozen one
    has none.
    """
    calls: list[Call] = []
    modules = [module for module in model.modules() if isinstance(module, ROUNDED)]
    handles = [module.register_forward_hook(lambda *call: calls.append(call)) for module in modules]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with emulate(FP16, FP32), Kept() as kept:
            value = loss()
    finally:
        for handle in handles:
            handle.remove()
    calls = [call for call in calls if call[2].requires_grad]
    outputs = [output for _, _, output in calls]
    grads = torch.autograd.grad(value, [*outputs, *kept.results], allow_unused=True)
    found, between = grads[: len(calls)], [grad for grad in grads[len(calls) :] if grad is not None]
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    made = [(call, grad) for call, grad in zip(calls, found, strict=True) if grad is not None and grad.any()]
    uses = [_parameter_gradients(module, inputs[0].detach(), grad) for (module, inputs, _), grad in made]
    weights, biases = ([use[name] for use in uses if name in use] for name in ("weight", "bias"))
    return Gradients([*(grad for _, grad in made), *weights], biases, between)


def _parameter_gradients(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of the weight and the bias by one use of the module, of those that are trained."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        return {}
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in trained.items()}
    output = torch.func.functional_call(module, parameters, (inputs,))
    found = torch.autograd.grad(output, list(parameters.values()), output_grad)
    return dict(zip(parameters, found, strict=True))


def best_scale(amax: float, format: Format) -> float:
    """Returns the largest power of two with which `amax` does not overflow."""
    return 2.0 ** math.floor(math.log2(format.max / amax))


def _lost(gradient: Tensor, threshold: float) -> float:
    energy = gradient.square()
    return float(energy[gradient.abs() <= threshold].sum() / energy.sum())
