"""The result of a step: tensors on the device, copied to the host when they are read."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.result import Status
from gradscale.engine.uncalled import to_be_called
from gradscale.kernels.torch import largest
from gradscale.torch.step import host_copy
from gradscale.torch.step.gradients import Gradients, Names
from gradscale.torch.step.host_copy import HostCopy


class Traces:
    """Weak references to the gradients of a step, to find later which of them were not finite.

    Attributes:
        parameters: weak references to the parameters of the gradients.
    """

    # Weak, because a result may be kept in a log: it must not hold a set of gradients after `zero_grad`.

    __slots__ = ("_counts", "_grads", "_optimizers", "_versions", "parameters")

    def __init__(self, gradients: Gradients, sizes: Tensor | None = None) -> None:
        """Refers to `gradients`, and counts what is not finite in them if `sizes` of a skipped step are given.

        The counts then outlive the gradients. A pass over the non-finite gradients in host memory, over all of them on
        a device, where the sizes cannot be read. Does not synchronize.
        """
        self.parameters = list(map(weakref.ref, gradients.parameters))
        self._grads = list(map(weakref.ref, gradients.grads))
        self._versions = [grad._version for grad in gradients.grads]
        self._optimizers = list(map(weakref.ref, gradients.optimizers))
        self._counts: dict[int, Tensor] = {}
        if sizes is not None:
            known = sizes.tolist() if host_copy.in_host_memory(sizes.device) else [math.nan] * len(gradients)
            bad = [index for index, size in enumerate(known) if not math.isfinite(size)]
            self._counts = {index: _nonfinite(gradients.values[index]) for index in bad}

    def names(self, indices: Sequence[int], names: Names) -> list[str]:
        """Returns the names of the parameters at `indices`."""
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return names.of([self.parameters[index]() for index in indices], optimizers)

    def sizes(self) -> list[float]:
        """Returns the largest magnitude in each gradient; 0 for one that was freed or written to. Synchronizes."""
        grads = list(map(self._unchanged, range(len(self._grads))))
        values = [_values(grad) for grad in grads if grad is not None]
        found = iter(largest(values, values[0].device).tolist() if values else ())
        return [0.0 if grad is None else next(found) for grad in grads]

    def count(self, index: int) -> int | None:
        """Returns how many elements of a gradient are not finite. Synchronizes with the device.

        None if they were not counted in the step, and the gradient was freed or written to since; and where all are
        finite, and only their squares were not.
        """
        if index in self._counts:
            return int(self._counts[index]) or None
        grad = self._unchanged(index)
        return None if grad is None else int(_nonfinite(_values(grad))) or None

    def _unchanged(self, index: int) -> Tensor | None:
        """Returns a gradient as the step left it, or None if it was freed or written to since."""
        grad = self._grads[index]()
        return None if grad is None or grad._version != self._versions[index] else grad


def _values(grad: Tensor) -> Tensor:
    """Returns the numbers of a gradient that are held here."""
    # Of a DTensor, the local shard: to read all of it, every rank would have to make this call.
    held = grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[attr-defined]
    return held if held.layout is torch.strided else held.values()


def _nonfinite(values: Tensor) -> Tensor:
    return (~torch.isfinite(values)).sum()


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class StepResult(engine.StepResult):
    """The result of one `step`.

    `applied`, `scale`, `next_scale`, `loss_finite`, `grad_norm` and `amax` are 0-d tensors on the scaler's device;
    reading them does not synchronize. `poll` never does. `skipped`, `status` and `culprits` synchronize.

    Attributes:
        traces: weak references to the gradients; None where all are known to be finite.
        parameter_names: the names of parameters.
        gradient_count: how many gradients the step had; 0 where they were not counted.
        known: whether the step was applied, if the host knows it already: no copy is needed then.
        found: the culprits of all ranks, where they were gathered in the step.
    """

    traces: Traces | None = None
    gradient_count: int = 0
    known: bool | None = None
    found: list[Culprit] | None = None
    parameter_names: Names = field(default_factory=lambda: Names(()))
    _flags: HostCopy | None = field(default=None, init=False)

    def _shown_applied(self) -> Any:
        if self._flags is not None:
            self.poll()
        return host_copy.shown(self.applied) if self.known is None else self.known

    @staticmethod
    def _shown(value: Any) -> Any:
        return host_copy.shown(value)

    @to_be_called
    def poll(self) -> bool | None:
        """Returns whether the step was applied, or None if that is not known yet. Never synchronizes."""
        if self.known is None and self._copied().arrived:
            self.known = bool(self._read()[0])
        return self.known

    @to_be_called
    def skipped(self) -> bool:
        """Returns whether the optimizers were left alone. Synchronizes with the device."""
        if self.known is None:
            self.known = bool(self._read()[0])
        return not self.known

    @to_be_called
    def status(self) -> Status:
        """Returns the status of the step. Synchronizes with the device."""
        if not self.attempted:
            return Status.NO_GRADS
        return Status.of(*self._read()) if self.skipped() else Status.APPLIED

    @property
    def parameters(self) -> int:
        """How many gradients the step had, where that was recorded."""
        return self.gradient_count if self.traces is None else len(self.traces.parameters)

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in the optimizers' order. Synchronizes.

        Sizes were kept from the step, but not after `unscale_` and a fused step on a device. Counts of elements were
        kept where the host knew in the step that it is skipped: on the CPU, and with an optimizer that is not fused.
        What was not kept is read now, from gradients that were neither cleared nor written to since. With several ranks
        the list is the same on all of them where the host knew in the step; else it is of the gradients held here.
        """
        if self.found is not None:
            return list(self.found)
        if self.traces is None or (self.sizes is None and not self.skipped()):
            return []
        sizes: list[float] = self.traces.sizes() if self.sizes is None else self.sizes.tolist()
        bad = [index for index, size in enumerate(sizes) if not math.isfinite(size)]
        names = self.traces.names(bad, self.parameter_names)
        return culprits_of(names, [sizes[index] for index in bad], list(map(self.traces.count, bad)))

    def _copied(self) -> HostCopy:
        if self._flags is None:
            self._flags = HostCopy(self.applied, self.loss_finite)
        return self._flags

    def _read(self) -> list[float]:
        return self._copied().read()
