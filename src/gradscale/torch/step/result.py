"""What a step returns: whether it was applied and why not, known on the device at once and on the host when asked."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradscale.engine.result import Status
from gradscale.torch.step.gradients import Gradients, Names
from gradscale.torch.step.host_copy import Letter


@dataclass(frozen=True, slots=True)
class Culprit:
    """A parameter whose gradient was not finite.

    Attributes:
        name: the parameter.
        kind: `"nan"` if the gradient held a NaN, else `"inf"`.
        count: non-finite elements, or None once the gradient is gone.
    """

    name: str
    kind: Literal["inf", "nan"]
    count: int | None


class StepResult:
    """The outcome of one `step`.

    Reading `applied`, `scale`, `next_scale` and `grad_norm` costs nothing: they are tensors on the scaler's device.
    `poll` looks without waiting. `skipped`, `status` and `culprits` wait for the device.

    Attributes:
        applied: 0-d bool tensor; True if the optimizers were updated.
        scale: the scale that made the gradients, a 0-d float32 tensor.
        next_scale: the scale of the next step.
        loss_finite: 0-d bool tensor; False if a loss was inf or NaN, on this rank or another.
        grad_norm: the true norm, unscaled and before clipping; None unless `clip_norm` or `norm=True` was given.
        retries: how often the backward pass was run again.
        attempted: whether there were gradients at all.
    """

    __slots__ = (
        "_letter",
        "_names",
        "_sizes",
        "_traces",
        "applied",
        "attempted",
        "grad_norm",
        "loss_finite",
        "next_scale",
        "retries",
        "scale",
    )

    def __init__(
        self,
        *,
        applied: Tensor,
        scale: Tensor,
        next_scale: Tensor,
        loss_finite: Tensor,
        attempted: bool,
        sizes: Tensor,
        gradients: Gradients | None,
        names: Names,
        grad_norm: Tensor | None = None,
        retries: int = 0,
    ) -> None:
        self.applied = applied
        self.scale = scale
        self.next_scale = next_scale
        self.grad_norm = grad_norm
        self.retries = retries
        self.attempted = attempted
        self.loss_finite = loss_finite
        self._sizes = sizes
        self._names = names
        self._traces = None if gradients is None else _Traces(gradients)
        self._letter: Letter | None = None

    def __repr__(self) -> str:
        return f"StepResult(applied={self.poll()})"

    def skipped(self) -> bool:
        """Returns whether the optimizers were left alone. Waits for the device."""
        return not self._read()[0]

    def poll(self) -> bool | None:
        """Returns whether the step was applied, or None if that is not known yet. Never waits."""
        return bool(self._read()[0]) if self._sent().arrived else None

    @property
    def status(self) -> Status:
        """What became of the step. Waits for the device."""
        if not self.attempted:
            return Status.NO_GRADS
        applied, loss_finite = self._read()
        return Status.of(applied, loss_finite)

    @property
    def parameters(self) -> int:
        """How many gradients the result keeps track of: all of the step, or none where all were seen to be finite."""
        return 0 if self._traces is None else len(self._traces.parameters)

    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in the optimizers' order. Waits for the device.

        Costs no further pass over the gradients: the sizes were kept from the step. Elements are counted only where
        the gradient is still as the step left it.
        """
        if self._traces is None:
            return []
        bad = [(index, size) for index, size in enumerate(self._sizes.tolist()) if not math.isfinite(size)]
        names = self._traces.names([index for index, _ in bad], self._names)
        return [
            Culprit(name, "nan" if math.isnan(size) else "inf", self._traces.count(index))
            for name, (index, size) in zip(names, bad, strict=True)
        ]

    def _sent(self) -> Letter:
        if self._letter is None:
            self._letter = Letter(self.applied, self.loss_finite)
        return self._letter

    def _read(self) -> list[float]:
        return self._sent().read()


class _Traces:
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
        """Returns the non-finite elements of a gradient that nobody has touched since; None where it is gone."""
        grad = self._grads[index]()
        if grad is None or grad._version != self._versions[index]:
            return None
        # Of a distributed gradient the shard held here: to count in all of it would wait for every other rank.
        held = grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[attr-defined]
        values = held if held.layout is torch.strided else held.values()
        return int((~torch.isfinite(values)).sum())
