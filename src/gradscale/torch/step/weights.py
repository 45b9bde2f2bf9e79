"""How large the weights of optimizers are: before their first step, and when a run is stuck."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.engine.diagnosis import Weights
from gradscale.kernels.torch import largest
from gradscale.torch.local import local
from gradscale.torch.step.gradients import Names, parameters_of

Optimizer = torch.optim.Optimizer


class WeightSizes:
    """The largest weight before the first step of its optimizer, to compare with when a run is stuck."""

    # One read of the weights, once. Without it, a model whose weights are large by design would look diverged.

    __slots__ = ("_at_start", "_known")

    def __init__(self) -> None:
        self._at_start: Tensor | None = None
        self._known: set[int] = set()

    def begin(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Measures the weights of optimizers that it has not seen yet. Does not synchronize with the device."""
        new = [optimizer for optimizer in optimizers if id(optimizer) not in self._known]
        if not new:
            return
        self._known.update(map(id, new))
        values = _readable(new)[1]
        if values:
            size = largest(values, device).amax()
            self._at_start = size if self._at_start is None else torch.maximum(self._at_start, size)

    @property
    def at_start(self) -> float | None:
        """The largest weight before the first step; None before that. Reading it synchronizes with the device."""
        return None if self._at_start is None else float(self._at_start)

    def now(self, optimizers: Sequence[Optimizer], names: Names) -> Weights | None:
        """Returns how large the weights are now; None if none can be read. Synchronizes with the device."""
        parameters, values = _readable(optimizers)
        sizes: list[float] = largest(values, values[0].device).tolist() if values else []
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        named = zip(sizes, names.of(parameters, optimizers), strict=True)
        return Weights.of(named, self.at_start, max(rates, default=None))


def _readable(optimizers: Sequence[Optimizer]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters whose numbers can be read, and the tensors that hold them: of a shard, the local one."""
    # By exact type: quantized weights and the like need not have the kernel, and a report is not worth an error.
    held = [(each, local(each.detach())) for each in parameters_of(optimizers)]
    found = [(each, values) for each, values in held if type(values) is Tensor and _is_dense_float(values)]
    return [each for each, _ in found], [values for _, values in found]


def _is_dense_float(values: Tensor) -> bool:
    wide = values.is_complex() or (values.is_floating_point() and values.dtype.itemsize >= 2)
    return wide and values.layout is torch.strided and values.device.type != "meta"
