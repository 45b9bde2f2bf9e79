"""What the reference decides: whether a step is applied, why not, and what its result says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tests.torch.fuzz.gradient import Gradient, amax_of, norm_of, rounded
from tests.torch.fuzz.operations import Step
from tests.torch.fuzz.outcome import Bad, Outcome
from tests.torch.fuzz.plain_optimizers import PlainOptimizers
from tests.torch.fuzz.scale_rule import ScaleRule
from tests.torch.fuzz.setup import Setup
from tests.torch.fuzz.window import Window

from gradscale.engine.result import Status


@dataclass(frozen=True)
class Decision:
    """Decides the steps of a program."""

    setup: Setup
    optimizers: PlainOptimizers
    rule: ScaleRule

    def of(self, operation: Step, window: Window, held: Mapping[str, Gradient]) -> Outcome:
        """Returns the outcome of a step with the gradients `held`, and takes the next state of the rule."""
        norm_read = operation.norm or operation.clip_norm is not None
        # Sizes of what `unscaled` has divided are those from before the edits.
        rest = {name: gradient for name, gradient in held.items() if name not in window.unscaled}
        divisor = window.scale if len(rest) == len(held) else 1.0
        squares_fit = not norm_read or norm_of(held.values(), divisor) != torch.inf
        finite = self.all_finite(held) and squares_fit and not window.overflowed
        loss_finite = window.loss_finite or window.overflowed
        measured = [*window.as_made.values(), *rest.values()]
        amax = amax_of(measured, window.scale) if finite else torch.inf
        if held:
            share = self.rule.share(measured, window.scale)
            self.rule.step(finite=finite, loss_finite=loss_finite, amax=amax, share=share, norm_read=norm_read)
        norm = norm_of(held.values()) if finite else torch.inf
        unnamed = self._unnamed(window, held)
        return Outcome(
            status=Status.of(finite and loss_finite, loss_finite) if held else Status.NO_GRADS,
            scale=window.scale,
            next_scale=self.rule.scale,
            norm=norm if norm_read and held else None,
            amax=amax if held else None,
            retries=window.retries,
            culprits=None if unnamed else self._culprits(operation.optimizers, held, norm_read, divisor),
        )

    def _unnamed(self, window: Window, held: Mapping[str, Gradient]) -> bool:
        """Returns whether gradients were edited, or may be NaN where they were inf: complex ones after a retry."""
        complex_ones = [each for each in held.values() if each.values.is_complex()]
        return bool(window.unscaled or (window.retries and any(not each.finite for each in complex_ones)))

    def all_finite(self, held: Mapping[str, Gradient]) -> bool:
        """Returns whether all gradients are finite, also once they are divided by the scale in their dtype."""
        return all(gradient.finite and self._finite_once_divided(name, gradient) for name, gradient in held.items())

    def _finite_once_divided(self, name: str, gradient: Gradient) -> bool:
        dtype = torch.float32 if self.optimizers.masters_of(name) else self.optimizers.gradient_dtype(name)
        return Gradient(rounded(gradient.values, 1.0, dtype), gradient.rows).finite

    def _culprits(
        self, optimizers: Sequence[int], held: Mapping[str, Gradient], norm_read: bool, divisor: float
    ) -> tuple[Bad, ...] | None:
        """Returns the gradients that were not finite; None where it is not defined which are named.

        That is where `unscaled` has let the user edit them, where they are finite until they are divided by a scale
        below 1, and where only their squares are not finite.
        """
        finite = {name: gradient for name, gradient in held.items() if gradient.finite}
        if not self.all_finite(finite):
            return None
        if norm_read and any(norm_of([gradient], divisor) == torch.inf for gradient in finite.values()):
            return None
        called = self._called(optimizers)
        return tuple(
            Bad(called[name], gradient.kind, gradient.bad_elements)
            for name, gradient in held.items()
            if name not in finite
        )

    def _called(self, optimizers: Sequence[int]) -> dict[str, str]:
        """Returns what a result calls each parameter: its name in the model, or its place in the last optimizer."""
        return {
            name: name if self.setup.has_model else f"param_groups[{group}].params[{position}]"
            for index in optimizers
            for group, names in enumerate(self.optimizers.groups[index])
            for position, name in enumerate(names)
        }
