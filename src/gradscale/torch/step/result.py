"""The result of a step: known on the device at once, and on the host when it is asked for."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.result import Status
from gradscale.torch.step.gradients import Gradients, Names
from gradscale.torch.step.host_copy import HostCopy


class Traces:
    """Weak references to the gradients of a step, for when somebody asks which of them was not finite.

    Attributes:
        parameters: who owned the gradients.
    """

    __slots__ = ("_grads", "_optimizers", "_versions", "parameters")

    def __init__(self, gradients: Gradients) -> None:
        self.parameters = list(map(weakref.ref, gradients.parameters))
        self._grads = list(map(weakref.ref, gradients.grads))
        self._versions = [grad._version for grad in gradients.grads]
        self._optimizers = list(map(weakref.ref, gradients.optimizers))

    def names(self, indices: Sequence[int], names: Names) -> list[str]:
        """Returns what the parameters at `indices` are called."""
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return names.of([self.parameters[index]() for index in indices], optimizers)

    def count(self, index: int) -> int | None:
        """Returns the non-finite elements of a gradient that nobody has touched since; None where it is gone.

        None too where all are finite, and only their squares were not.
        """
        grad = self._grads[index]()
        if grad is None or grad._version != self._versions[index]:
            return None
        # Of a distributed gradient the shard held here: counting in all of it would wait for every other rank.
        held = grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[attr-defined]
        values = held if held.layout is torch.strided else held.values()
        return int((~torch.isfinite(values)).sum()) or None


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult(engine.StepResult):
    """The result of one `step`.

    `applied`, `scale`, `next_scale`, `loss_finite`, `grad_norm` and `amax` are 0-d tensors on the scaler's device;
    reading them does not synchronize. `poll` never does. `skipped`, `status` and `culprits` synchronize.

    Attributes:
        traces: the gradients, as long as they live; None where all were seen to be finite.
        parameter_names: what parameters are called.
    """

    traces: Traces | None = None
    parameter_names: Names = field(default_factory=lambda: Names(()))
    _flags: HostCopy | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"StepResult(applied={self.poll()})"

    def poll(self) -> bool | None:
        """Returns whether the step was applied, or None if that is not known yet. Never synchronizes."""
        return bool(self._read()[0]) if self._copied().arrived else None

    def skipped(self) -> bool:
        """Returns whether the optimizers were left alone. Synchronizes with the device."""
        return not self._read()[0]

    def status(self) -> Status:
        """Returns the status of the step. Synchronizes with the device."""
        return Status.of(*self._read()) if self.attempted else Status.NO_GRADS

    @property
    def parameters(self) -> int:
        """How many gradients the result keeps track of: all of the step, or none where all were seen to be finite."""
        return 0 if self.traces is None else len(self.traces.parameters)

    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in the optimizers' order. Synchronizes.

        Does not read the gradients again: the sizes were kept from the step. Elements are counted only where the
        gradient is still as the step left it.
        """
        if self.traces is None or self.sizes is None:
            return []
        sizes: list[float] = self.sizes.tolist()
        bad = [index for index, size in enumerate(sizes) if not math.isfinite(size)]
        names = self.traces.names(bad, self.parameter_names)
        return culprits_of(names, [sizes[index] for index in bad], list(map(self.traces.count, bad)))

    def _copied(self) -> HostCopy:
        if self._flags is None:
            self._flags = HostCopy(self.applied, self.loss_finite)
        return self._flags

    def _read(self) -> list[float]:
        return self._copied().read()
