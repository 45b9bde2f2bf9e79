"""The reference: a plain training loop without a scale, which knows what goes wrong and what should happen then."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatchmethod

import torch
from tests.torch.fuzz import operations as ops
from tests.torch.fuzz.decision import Decision
from tests.torch.fuzz.gradient import Gradient, added, clamped, made, norm_of, rounded, times
from tests.torch.fuzz.held_gradients import HeldGradients
from tests.torch.fuzz.model import Model, initial
from tests.torch.fuzz.outcome import Outcome, Refused, Result, Undefined
from tests.torch.fuzz.plain_optimizers import PlainOptimizers
from tests.torch.fuzz.policies import INEXACT
from tests.torch.fuzz.scale_rule import ScaleRule
from tests.torch.fuzz.setup import Setup
from tests.torch.fuzz.window import Window
from torch import Tensor

from gradscale.engine.result import Status
from gradscale.torch.scaler import RETRIES

LOOSE = 2.0**-18
"""Relative difference where a factor was rounded: a clip that binds, or a scale that is no power of two. The factor is
a float32 number and is applied in one or two roundings; a few more follow in the optimizer."""

LOOSE_HALF = 2.0**-7
"""The same where gradients are BF16, whose numbers have 8 bits."""


class Reference:
    """Interprets a program in plain torch.

    Gradients are known without autograd: they are the coefficients of the batches, and the faults say which elements
    are not finite. Nothing is scaled. The scale is only computed to know what overflows in FP16, and to compare it.

    Attributes:
        model: its own copy of the model, whose forward pass gives losses and buffers.
        optimizers: torch's, on the model's parameters and on masters.
        gradients: what `.grad` holds, unscaled.
        rule: the policy.
        window: what happened since the last step; None where no loss was scaled.
        loose: parameters whose weights the last operation computed with roundings of its own, and how large they are,
            relative to the weights.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = Model(setup)
        self.optimizers = PlainOptimizers(setup, self.model)
        self.gradients = HeldGradients()
        self.rule = ScaleRule(setup.policy)
        self.window: Window | None = None
        self.loose: dict[str, float] = {}
        self._only_scaled = False
        self._owned: set[str] = set()
        self._decision = Decision(setup, self.optimizers, self.rule)
        self._buffers_before: dict[str, Tensor] | None = None

    def run(self, operation: ops.Operation) -> Result:
        """Runs one operation, and returns what gradscale should give.

        Raises:
            Undefined: what should happen is not defined.
        """
        self.loose = {}
        self.rule.estimates = False
        return self._run(operation)

    @singledispatchmethod
    def _run(self, operation: ops.Operation) -> Result:
        raise NotImplementedError(f"The reference does not know {operation}.")

    # Passes over a batch.

    @_run.register
    def _(self, operation: ops.Backward) -> Result:
        loss_finite = bool(self._forward(operation.batch).isfinite())
        if not self.rule.scales:
            # Sparse gradients are not coalesced here, and the sums of clipped ones are rounded: their order counts.
            self.loose = {
                name: LOOSE for name, grad in self.gradients.items() if grad.rows is not None and grad.clipped
            }
            self._accumulate(self._made(operation.batch, 1.0), 1.0)
            return None
        window = self._opened()
        self.gradients.begin_pass()
        if window.unscaled & self.gradients.keys():
            return Refused()
        first, earlier = not window.began, self._any_but_zeros()
        window.begin()
        window.loss_finite &= loss_finite
        retries = operation.retries if loss_finite and first and not earlier else 0
        fresh = self._attempts(operation.batch, window, retries, self._owned)
        self._accumulate(fresh, window.scale)
        window.left = self._any_known()
        return None

    @_run.register
    def _(self, operation: ops.Grad) -> Result:
        loss_finite = bool(self._forward(operation.batch).isfinite())
        if not self.rule.scales:
            return tuple(each.values for each in self._made(operation.batch, 1.0).values())
        window = self._opened()
        self.gradients.begin_pass()
        window.began = True
        found = self._made(operation.batch, window.scale)
        for name, gradient in found.items():
            # Divided in float32 if it was narrower.
            dtype = self.optimizers.gradient_dtype(name)
            gradient.values = rounded(gradient.values, 1.0, torch.float32 if dtype.itemsize < 4 else dtype)
        window.left = self._any_known()
        window.overflowed |= window.loss_finite and loss_finite and not _finite(found.values())
        return tuple(each.values for each in found.values())

    @torch.no_grad()
    def _forward(self, batch: ops.Batch) -> Tensor:
        """Returns the loss. The forward pass updates the buffers."""
        if self._buffers_before is None:
            self._buffers_before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return self.model(batch)

    def _made(self, batch: ops.Batch, scale: float) -> dict[str, Gradient]:
        """Returns the gradients that one backward pass makes, of all trained parameters."""
        return {
            name: made(self.setup.parameter(name), batch, scale, self.optimizers.gradient_dtype(name))
            for name in batch.parameters
            if self.model.get_parameter(name).requires_grad
        }

    def _any_but_zeros(self, names: Iterable[str] | None = None) -> bool:
        """Returns whether a parameter, by default any, holds a gradient that is not all zeros."""
        held = map(self.gradients.get, (each.name for each in self.setup.parameters) if names is None else names)
        return any(bool((gradient.values != 0).any()) for gradient in held if gradient is not None)

    def _attempts(self, batch: ops.Batch, window: Window, retries: int, owned: set[str]) -> dict[str, Gradient]:
        """Returns the gradients of the last attempt, at the scale that the window then has.

        Gradients of `owned` parameters count, of all while that is empty.
        """
        before = self.rule.state

        def finite() -> bool:
            return _finite(gradient for name, gradient in fresh.items() if not owned or name in owned)

        fresh = self._made(batch, window.scale)
        for _ in range(retries):
            if finite() or not self.rule.lowered(window.scale):
                break
            window.scale, window.retries = self.rule.scale, window.retries + 1
            fresh = self._made(batch, window.scale)
        if not finite():
            # No scale helped: the step that follows backs off once, and the attempts leave the rule as it was.
            self.rule.state = before
        return fresh

    def _accumulate(self, fresh: dict[str, Gradient], scale: float) -> None:
        self.gradients.accumulate(
            {
                name: added(self.gradients.get(name), gradient, scale, self.optimizers.gradient_dtype(name))
                for name, gradient in fresh.items()
            }
        )

    def _any_known(self) -> bool:
        """Returns whether a parameter that the scaler knows holds a gradient."""
        known = [each.name for each in self.setup.parameters] if self.setup.has_model else self._owned
        return any(self.gradients.get(name) is not None for name in known)

    def _opened(self) -> Window:
        """Returns the window of a backward pass that begins."""
        if self.window is None or (self.window.left and not self._any_known()):
            self.window = Window(self.rule.scale)
            self.gradients.defined -= self.gradients.stale
        return self.window

    # Steps.

    @_run.register
    def _(self, operation: ops.Step) -> Result:
        indices, names = operation.optimizers, self.optimizers.names(operation.optimizers)
        held = self.gradients.each_once(names)
        if not self.rule.scales:
            return self._step_unchecked(operation, held)
        window = self._ready(names)
        if window is None:
            return Refused()
        some_divided = window.unscaled & held.keys() and held.keys() - window.unscaled
        in_place = indices if some_divided or operation.clip_value else self.optimizers.sharing(indices, self.gradients)
        if self.optimizers.keep_half_gradients(in_place, self.gradients):
            return Refused()
        self._owned |= set(names)
        outcome = self._decision.of(operation, window, held)
        applied = outcome.status is Status.APPLIED
        if applied and self.gradients.taken_for_new & held.keys():
            raise Undefined("The scale of a gradient from before the last step, which an edit has hidden.")
        if applied:
            self._apply(operation, held, outcome.norm)
        self._settle_buffers(applied=applied)
        self._close(held if applied else ())
        return outcome

    def _ready(self, names: Sequence[str]) -> Window | None:
        """Returns the window whose gradients can be used; None where that is refused."""
        if self.window is None or not self.window.began:
            return None
        if stale := self.gradients.stale & set(names):
            if not self.setup.has_model and not stale <= self._owned:
                raise Undefined(
                    "A scaler without a model does not know the gradients of optimizers it has not stepped."
                )
            self._owned |= set(names)
            self._close()
            return None
        return self.window

    def _step_unchecked(self, operation: ops.Step, held: dict[str, Gradient]) -> Outcome:
        """Steps without any check, as `NoScaling` does."""
        norm_read = operation.norm or operation.clip_norm is not None
        norm = norm_of(held.values())
        self.rule.step(finite=True, loss_finite=True, amax=0.0, share=0.0, norm_read=False)
        # Masters take the factor of a clip with 16-bit gradients, which they leave as they are.
        kept = {} if operation.clip_value else {name: held[name].values for name in held if self._stays(name)}
        self._apply(operation, held, norm)
        for name, values in kept.items():
            held[name].values = values
        # Sparse gradients are not coalesced here, so that sums are taken in another order.
        self.loose |= {name: LOOSE for name, gradient in held.items() if gradient.rows is not None}
        return Outcome(Status.APPLIED, 1.0, 1.0, norm if norm_read else None, None, 0, None)

    def _stays(self, name: str) -> bool:
        return self.optimizers.masters_of(name) is not None and self.optimizers.gradient_dtype(name).itemsize < 4

    def _apply(self, operation: ops.Step, held: dict[str, Gradient], norm: float | None) -> None:
        """Clips the gradients and steps the optimizers."""
        coefficient = 1.0
        if operation.clip_norm is not None and norm is not None and norm == norm:
            # As `torch.nn.utils.clip_grad_norm_` computes it; but a NaN does not spread to all gradients.
            coefficient = min(1.0, operation.clip_norm / (norm + 1e-6))
        for gradient in held.values():
            if coefficient != 1.0:
                gradient.values, gradient.clipped = times(gradient.values, coefficient), True
            if operation.clip_value is not None:
                gradient.values = clamped(gradient.values, operation.clip_value)
        for index in operation.optimizers:
            self.optimizers.give(index, self.gradients, makes_momentum=self.rule.scales)
            self.optimizers[index].step()
            self.optimizers.take_back(index, self.gradients)
        if coefficient != 1.0 or self.setup.policy in INEXACT:
            for name in {*self.optimizers.names(operation.optimizers), *self.gradients.names_of(held.values())}:
                # 16-bit gradients may be multiplied in place.
                narrow = self.optimizers.gradient_dtype(name).itemsize < 4
                self.loose[name] = LOOSE_HALF if narrow else LOOSE

    def _close(self, divided: Iterable[str] = ()) -> None:
        """Ends the window. The gradients in `divided` are unscaled now, but for those of masters."""
        self.window, self._only_scaled = None, False
        self.gradients.close(name for name in divided if not self.optimizers.masters_of(name))

    def _settle_buffers(self, *, applied: bool) -> None:
        """Restores the buffers to what they were before the forward passes of a skipped step."""
        if self.setup.protects_buffers and not applied and self._buffers_before is not None:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers_before[name])
        self._buffers_before = None

    @_run.register
    def _(self, operation: ops.Closure) -> Result:
        index, names = operation.optimizer, self.optimizers.names([operation.optimizer])
        if self.optimizers.keep_half_gradients([index], self.gradients):
            return Refused()
        outcomes: list[Outcome] = []
        self.optimizers[index].step(lambda: self._evaluated(index, operation.batch, outcomes))  # type: ignore[arg-type]
        self.optimizers.take_back(index, self.gradients)
        if self.setup.policy in INEXACT:
            self.loose = dict.fromkeys(names, LOOSE)
        return outcomes[-1]

    def _evaluated(self, index: int, batch: ops.Batch, outcomes: list[Outcome]) -> Tensor:
        """Evaluates the loss for an optimizer, leaves its gradients, and returns the loss."""
        names = self.optimizers.names([index])
        for name in names:
            self.gradients.clear(name, set_to_none=True)
        loss = self._forward(batch)
        loss_finite = bool(loss.isfinite())
        window = self.window = Window(self.rule.scale, began=True, loss_finite=loss_finite)
        retries = RETRIES if self.rule.scales and loss_finite and not self._any_but_zeros() else 0
        self._accumulate(self._attempts(batch, window, retries, set(names)), window.scale)
        self._owned |= set(names)
        held = self.gradients.each_once(names)
        outcome = self._decision.of(ops.Step((index,), norm=True), window, held)
        if not self.rule.scales and held:
            outcome = replace(outcome, status=Status.APPLIED, amax=None, culprits=None)
        applied = outcome.status is Status.APPLIED
        # The gradients of a skipped evaluation are replaced by zeros, and nobody can count their elements later.
        culprits = outcome.culprits and tuple(replace(bad, count=None) for bad in outcome.culprits)
        outcomes.append(replace(outcome, culprits=culprits))
        for gradient in () if applied else held.values():
            gradient.values = torch.zeros_like(gradient.values)
            gradient.rows = None if gradient.rows is None else set()
        self._settle_buffers(applied=applied)
        self._close(held)
        self.optimizers.give(index, self.gradients, makes_momentum=False)
        return loss

    # Clearing and editing gradients.

    @_run.register
    def _(self, operation: ops.ZeroGrad) -> Result:
        every = [parameter.name for parameter in self.setup.parameters]
        names = every if operation.optimizer is None else self.optimizers.names([operation.optimizer])
        for name in names:
            self.gradients.clear(name, set_to_none=operation.set_to_none)
        if self.window is not None:
            self.window.unscaled -= set(names)
        return None

    @_run.register
    def _(self, operation: ops.Unscaled) -> Result:
        if self.rule.scales:
            names = self.optimizers.names(operation.optimizers)
            window = self._ready(names)
            if window is None or self.optimizers.keep_half_gradients(operation.optimizers, self.gradients):
                return Refused()
            self._unscale(window, self.gradients.each_once(names))
        for inner in operation.inside:
            self._run(inner)
        return None

    def _unscale(self, window: Window, held: dict[str, Gradient]) -> None:
        fresh = {name: gradient for name, gradient in held.items() if name not in window.unscaled}
        window.as_made |= {name: replace(gradient) for name, gradient in fresh.items()}
        window.overflowed |= window.loss_finite and not self._decision.all_finite(fresh)
        for name, gradient in fresh.items():
            gradient.values = rounded(gradient.values, 1.0, self.optimizers.gradient_dtype(name))
        window.unscaled |= self.gradients.names_of(fresh.values())

    @_run.register
    def _(self, operation: ops.Multiply) -> Result:
        if (gradient := self.gradients.get(operation.parameter)) is not None:
            gradient.values = times(gradient.values, operation.factor)
            self.gradients.write(operation.parameter)
        return None

    @_run.register
    def _(self, operation: ops.Clamp) -> Result:
        if (gradient := self.gradients.get(operation.parameter)) is not None:
            # The bound is on what `.grad` holds, scaled or not.
            scaled = self.window is not None and operation.parameter not in self.window.unscaled
            bound = operation.bound / (self.window.scale if self.window is not None and scaled else 1.0)
            gradient.values = clamped(gradient.values.nan_to_num(0.0, torch.inf, -torch.inf), bound)
            self.gradients.write(operation.parameter)
        return None

    @_run.register
    def _(self, operation: ops.Poke) -> Result:
        if (gradient := self.gradients.get(operation.parameter)) is not None and gradient.values.numel():
            gradient.poison(operation.index, operation.value)
            self.gradients.write(operation.parameter)
        return None

    @_run.register
    def _(self, operation: ops.ShareGradient) -> Result:
        if self.window is not None and self.window.retries and operation.target not in self.gradients:
            raise Undefined("A retry does not know of a gradient that is set later, and refuses it.")
        self.gradients.share(operation.source, operation.target)
        if self.window is not None and operation.source in self.window.unscaled:
            self.window.unscaled.add(operation.target)
        return None

    # Changes of the model and the optimizers between steps.

    @_run.register
    def _(self, operation: ops.AddGroup) -> Result:
        index = operation.optimizer
        casts = {name for name in operation.parameters if self.optimizers.has_master(index, name)}
        if self.setup.optimizers[index].grad_fp32 and self.gradients.stale & casts:
            raise Undefined("A stale gradient is cast to float32, and can no longer be recognized.")
        self.optimizers.add_group(index, operation.parameters)
        return None

    @_run.register
    def _(self, operation: ops.Freeze) -> Result:
        self.model.get_parameter(operation.parameter).requires_grad_(operation.trained)
        return None

    @_run.register
    def _(self, operation: ops.SetRate) -> Result:
        for group in self.optimizers[operation.optimizer].param_groups:
            group["lr"] = operation.lr
        return None

    @_run.register
    @torch.no_grad()
    def _(self, operation: ops.WriteWeight) -> Result:
        weight = self.model.get_parameter(operation.parameter)
        weight.copy_(initial(self.setup.parameter(operation.parameter)))
        self.optimizers.note_written([operation.parameter])
        return None

    @_run.register
    def _(self, operation: ops.WriteBuffer) -> Result:
        self.model.total.fill_(operation.value)
        return None

    # What must change nothing.

    @_run.register
    def _(self, operation: ops.Evaluate) -> Result:
        self._only_scaled = True
        return None

    @_run.register
    def _(self, operation: ops.Look) -> Result:
        return None

    @_run.register
    def _(self, operation: ops.Save) -> Result:
        if operation.how in ("deepcopy", "pickle") and self.window is not None:
            return Refused()
        if operation.how in ("deepcopy", "pickle") and self._only_scaled:
            raise Undefined("A loss was scaled and not differentiated: the scaler may refuse to be copied.")
        self.window = None
        if operation.how != "in place":
            self._owned = set()  # a new scaler, or a copy, has stepped no optimizer
        if operation.how == "fresh scaler" and self.gradients.touched and not self.setup.has_model:
            raise Undefined("A scaler without a model cannot know gradients from before it was made.")
        if operation.how in ("in place", "fresh scaler"):
            self.gradients.discard()
        else:
            # Neither copies of parameters nor new ones have gradients.
            for name in list(self.gradients):
                self.gradients.clear(name, set_to_none=True)
        if operation.how in ("fresh scaler", "checkpoint"):
            self._buffers_before = None
        if operation.how == "checkpoint":
            self.optimizers.load_checkpoint()
        return None


def _finite(gradients: Iterable[Gradient]) -> bool:
    return all(gradient.finite for gradient in gradients)
