"""Gradients that `LossScaler.unscaled` has divided by the scale before the step."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch.gradients import Gradients, count_elements, parameters_of, values_of

Optimizer = torch.optim.Optimizer


class Unscaled:
    """Which gradients of a window are unscaled already, and how large they were before the user's edits.

    A gradient is known by its parameter, since an edit may replace it, and by its own identity, since two parameters
    may hold the same one.

    Attributes:
        optimizers: ids of the optimizers that were named, whose gradients the user may have edited.
    """

    def __init__(self) -> None:
        self.optimizers: set[int] = set()
        self._amax: Tensor | None = None
        self._share: Tensor | None = None
        self._elements = 0.0
        self._parameters: dict[int, Tensor] = {}
        # Weak: `zero_grad` frees the memory of a gradient.
        self._grads: dict[int, weakref.ref[Tensor]] = {}

    def note(self, gradients: Gradients, amax: Tensor, share: Tensor, weights: Sequence[float] | None = None) -> None:
        """Notes that `gradients` are unscaled from now on, their largest magnitude, and their share above the edge.

        `weights` are what the elements of each count in that share; None if all count the same.
        """
        self.optimizers.update(map(id, gradients.optimizers))
        # All parameters of the optimizers: an edit may give one a gradient that has none.
        self._parameters |= {id(parameter): parameter for parameter in parameters_of(gradients.optimizers)}
        self._grads |= {id(grad): weakref.ref(grad) for grad in gradients.grads}
        self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)
        elements = count_elements(gradients.values, weights)
        above = share * elements if self._share is None else self._share * self._elements + share * elements
        self._elements += elements
        self._share = above / (self._elements or 1.0)

    def sizes(self) -> list[Tensor]:
        """Returns the largest of the gradients and their share above the edge, before the edits."""
        return [size for size in (self._amax, self._share) if size is not None]

    def rest_of(self, gradients: Gradients) -> Gradients:
        """Returns those of `gradients` that are still scaled."""
        pairs = enumerate(zip(gradients.parameters, gradients.grads, strict=True))
        return gradients.at([index for index, (parameter, grad) in pairs if not self._has(parameter, grad)])

    def _has(self, parameter: Tensor, grad: Tensor) -> bool:
        noted = self._grads.get(id(grad))
        return id(parameter) in self._parameters or (noted is not None and noted() is grad)

    def refuse_backward(self) -> None:
        """Raises if the gradients of a backward pass would be added to unscaled ones.

        Synchronizes with the device only where unscaled gradients are still there, or were cleared in place.
        """
        if not all_zero([parameter for parameter in self._parameters.values() if parameter.grad is not None]):
            raise RuntimeError(
                "A backward pass of a scaled loss was begun after `scaler.unscaled(...)`, and would add scaled "
                "gradients to unscaled ones. Run all backward passes first, then `unscaled`, then `scaler.step(...)`; "
                "to discard what was unscaled, call `optimizer.zero_grad()`."
            )


def all_zero(parameters: Sequence[Tensor]) -> bool:
    """Returns whether the gradients of `parameters` are zeros, which have no scale. Synchronizes with the device."""
    return not any(values_of(each, each.grad).any() for each in parameters if each.grad is not None)
