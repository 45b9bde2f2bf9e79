"""The reference: a plain training loop without a scale, which knows what goes wrong and what should happen then."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from itertools import chain

import torch
from tests.torch.fuzz import operations as ops
from tests.torch.fuzz.gradient import Gradient, added, amax_of, made, norm_of, rounded, times
from tests.torch.fuzz.outcome import Bad, Outcome, Refused, Result, TorchRaises, Undefined
from tests.torch.fuzz.scale_rule import ScaleRule
from tests.torch.fuzz.setup import DTYPES, INEXACT, Model, OptimizerSetup, Setup, initial, make_optimizer, names_of
from torch import Tensor, nn

from gradscale.engine.result import Status
from gradscale.torch.accumulation.closure import RETRIES

LOOSE = 2.0**-18
"""Relative difference where a factor was rounded: a clip that binds, or a scale that is no power of two. The factor is
a float32 number and is applied in one or two roundings; a few more follow in the optimizer."""

LOOSE_HALF = 2.0**-7
"""The same where gradients are BF16, whose numbers have 8 bits."""


@dataclass
class Window:
    """What happened since the last step, as far as the result of the next depends on it.

    Attributes:
        scale: of all its losses.
        began: whether a backward pass has begun.
        loss_finite: whether every loss was finite.
        overflowed: whether gradients outside of the step overflowed.
        retries: how often a backward pass was run again.
        abandoned: whether all gradients were cleared, so that the next backward pass opens another window.
        unscaled: the parameters whose gradients `unscaled` has divided.
        as_made: these gradients before any edit.
    """

    scale: float
    began: bool = False
    loss_finite: bool = True
    overflowed: bool = False
    retries: int = 0
    abandoned: bool = False
    unscaled: set[str] = field(default_factory=set)
    as_made: dict[str, Gradient] = field(default_factory=dict)


class Reference:
    """Interprets a program in plain torch.

    Gradients are known without autograd: they are the coefficients of the batches, and the faults say which elements
    are not finite. Nothing is scaled. The scale is only computed to know what overflows in FP16, and to compare it.

    Attributes:
        model: its own copy of the model, whose forward pass gives losses and buffers.
        masters: for each optimizer, the float32 masters of its 16-bit parameters.
        optimizers: torch's, on the model's parameters and on the masters.
        gradients: what `.grad` holds, unscaled; a parameter without a gradient is not in it.
        defined: parameters whose `.grad` has a defined value: scaled inside a window, unscaled after an applied step.
        loose: parameters whose weights the last operation computed with roundings of its own, and how large they are,
            relative to the weights.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = Model(setup)
        self.rule = ScaleRule(setup.policy)
        self.groups = [[list(group) for group in optimizer.groups] for optimizer in setup.optimizers]
        self.masters: list[dict[str, nn.Parameter]] = [
            {name: self._master(name) for name in names_of(optimizer.groups) if self._has_master(index, name)}
            for index, optimizer in enumerate(setup.optimizers)
        ]
        self.optimizers = [
            make_optimizer(optimizer, lambda name, index=index: self.leaf(index, name))
            for index, optimizer in enumerate(setup.optimizers)
        ]
        self.gradients: dict[str, Gradient] = {}
        self.defined: set[str] = set()
        self.loose: dict[str, float] = {}
        self.window: Window | None = None
        self._stale: set[str] = set()
        self._touched: set[str] = set()
        self._aliased: set[str] = set()
        self._written: list[set[str]] = [set() for _ in setup.optimizers]
        self._before_forward: dict[str, Tensor] | None = None

    def leaf(self, optimizer: int, name: str) -> Tensor:
        """Returns the tensor that an optimizer steps: the master of a 16-bit parameter, or the parameter itself."""
        return self.masters[optimizer].get(name) if name in self.masters[optimizer] else self.model.get_parameter(name)  # type: ignore[return-value]

    def names(self, optimizers: Sequence[int]) -> list[str]:
        """Returns the parameters of optimizers, each once, in their order."""
        return names_of([group for index in optimizers for group in self.groups[index]])

    def masters_of(self, name: str) -> OptimizerSetup | None:
        """Returns the optimizer that has a master for a parameter; None without one."""
        return next(
            (each for each, held in zip(self.setup.optimizers, self.masters, strict=True) if name in held), None
        )

    def gradient_dtype(self, name: str) -> torch.dtype:
        """Returns the type in which autograd accumulates the gradients of a parameter."""
        masters = self.masters_of(name)
        return torch.float32 if masters and masters.grad_fp32 else DTYPES[self.setup.parameter(name).dtype]

    def run(self, operation: ops.Operation) -> Result:
        """Runs one operation, and returns what gradscale should give."""
        self.loose = {}
        self.rule.estimates = False
        return self._run(operation)

    @singledispatchmethod
    def _run(self, operation: ops.Operation) -> Result:
        raise NotImplementedError(f"The reference does not know {operation}.")

    # Passes over a batch.

    @_run.register
    def _(self, operation: ops.Backward) -> Result:
        loss_finite = self._forward(operation.batch)
        if not self.rule.scales:
            self._accumulate(self._made(operation.batch, 1.0), 1.0)
            return None
        window = self._opened()
        if not operation.retries:
            window.loss_finite &= loss_finite
        if window.unscaled & self.gradients.keys():
            return Refused()
        window.unscaled, window.as_made, window.began = set(), {}, True
        window.loss_finite &= loss_finite
        fresh = self._attempts(operation.batch, window, operation.retries if loss_finite else 0)
        self._accumulate(fresh, window.scale)
        return None

    @_run.register
    def _(self, operation: ops.Grad) -> Result:
        loss_finite = self._forward(operation.batch)
        if not self.rule.scales:
            return tuple(each.values for each in self._made(operation.batch, 1.0).values())
        window = self._opened()
        window.loss_finite &= loss_finite
        window.began = True
        found = self._made(operation.batch, window.scale)
        for name, gradient in found.items():
            # Divided in float32 if it was narrower.
            wide = self.gradient_dtype(name)
            gradient.values = rounded(gradient.values, 1.0, torch.float32 if wide.itemsize < 4 else wide)
        window.overflowed |= window.loss_finite and not all(each.finite for each in found.values())
        return tuple(each.values for each in found.values())

    def _forward(self, batch: ops.Batch) -> bool:
        """Runs the forward pass, which updates the buffers; returns whether the loss is finite."""
        if self._before_forward is None:
            self._before_forward = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with torch.no_grad():
            return bool(torch.isfinite(self.model(batch)))

    def _made(self, batch: ops.Batch, scale: float) -> dict[str, Gradient]:
        """Returns the gradients that one backward pass makes, of all trained parameters."""
        return {
            name: made(self.setup.parameter(name), batch, scale, self.gradient_dtype(name))
            for name in batch.parameters
            if self.model.get_parameter(name).requires_grad
        }

    def _attempts(self, batch: ops.Batch, window: Window, retries: int) -> dict[str, Gradient]:
        """Returns the gradients of the last attempt, at the scale that the window then has."""
        before = self.rule.state
        fresh = self._made(batch, window.scale)
        for _ in range(retries):
            if all(each.finite for each in fresh.values()) or not self.rule.lowered(window.scale):
                break
            window.scale, window.retries = self.rule.scale, window.retries + 1
            fresh = self._made(batch, window.scale)
        if not all(each.finite for each in fresh.values()):
            # No scale helped: the step that follows backs off once, and the attempts leave the rule as it was.
            self.rule.state = before
        return fresh

    def _accumulate(self, fresh: dict[str, Gradient], scale: float) -> None:
        if self._aliased & fresh.keys():
            raise Undefined("A backward pass adds to a tensor that is `.grad` of two parameters.")
        for name, gradient in fresh.items():
            earlier = self.gradients.get(name)
            self.gradients[name] = added(earlier, gradient, scale, self.gradient_dtype(name))
            self._touched.add(name)
            if name not in self._stale:
                self.defined.add(name)

    def _opened(self) -> Window:
        if self.window is None or self.window.abandoned:
            self.window = Window(self.rule.scale)
            self.defined -= self._stale
        return self.window

    # Steps.

    @_run.register
    def _(self, operation: ops.Step) -> Result:
        names = self.names(operation.optimizers)
        if not self.rule.scales:
            return self._step_unchecked(operation, names)
        window = self.window
        if window is None or not window.began:
            return Refused()
        if self._stale & set(names):
            self._close()
            return Refused()
        held = self._held(names)
        if window.unscaled & set(held) and set(held) - window.unscaled and self._keeps_half(names):
            return Refused()
        first = self._held_twice(operation.optimizers) if operation.clip_value is None else operation.optimizers
        if self._keeps_half(self.names(first)):
            return Refused()
        outcome = self._decided(operation, window, held)
        if outcome.status is Status.APPLIED:
            self._apply(operation, held, outcome.norm)
        self._settle_buffers(applied=outcome.status is Status.APPLIED)
        self._close(held if outcome.status is Status.APPLIED else ())
        return outcome

    def _held(self, names: Sequence[str]) -> dict[str, Gradient]:
        """Returns the gradients of parameters, each once: two parameters may have one."""
        found = {id(self.gradients[name]): name for name in reversed(names) if name in self.gradients}
        return {name: self.gradients[name] for name in names if name in found.values()}

    def _decided(self, operation: ops.Step, window: Window, held: dict[str, Gradient]) -> Outcome:
        """Returns the outcome of a step, and takes the next state of the rule."""
        norm_read = operation.norm or operation.clip_norm is not None
        # Sizes of what `unscaled` has divided are those from before the edits.
        as_made = {name: gradient for name, gradient in held.items() if name not in window.unscaled}
        divisor = window.scale if len(as_made) == len(held) else 1.0
        scaled_norm = norm_of(held.values(), divisor)
        finite = self._all_finite(held) and not window.overflowed and not (norm_read and scaled_norm == torch.inf)
        loss_finite = window.loss_finite or window.overflowed
        status = Status.of(finite and loss_finite, loss_finite)
        measured = [*window.as_made.values(), *as_made.values()]
        amax = amax_of(measured, window.scale) if finite else torch.inf
        share = self.rule.share(measured, window.scale)
        if held:
            self.rule.step(finite=finite, loss_finite=loss_finite, amax=amax, share=share, norm_read=norm_read)
        norm = norm_of(held.values()) if finite else torch.inf
        return Outcome(
            status=status if held else Status.NO_GRADS,
            scale=window.scale,
            next_scale=self.rule.scale,
            norm=norm if norm_read and held else None,
            amax=amax if held else None,
            retries=window.retries,
            culprits=self._culprits(operation.optimizers, held, norm_read=norm_read, divisor=divisor),
        )

    def _all_finite(self, held: dict[str, Gradient]) -> bool:
        """Returns whether all gradients are finite, also once they are divided by the scale in their dtype."""
        return all(
            gradient.finite and Gradient(rounded(gradient.values, 1.0, self._divided_dtype(name)), gradient.rows).finite
            for name, gradient in held.items()
        )

    def _divided_dtype(self, name: str) -> torch.dtype:
        """Returns the type in which a gradient is divided: masters divide in float32."""
        return torch.float32 if self.masters_of(name) else self.gradient_dtype(name)

    def _culprits(
        self, optimizers: Sequence[int], held: dict[str, Gradient], *, norm_read: bool, divisor: float
    ) -> tuple[Bad, ...] | None:
        """Returns the gradients that were not finite; None where it is not defined which are named."""
        window = self.window
        if window is not None and window.unscaled:
            return None  # edits may have hidden what was not finite
        if self._all_finite(held) != all(each.finite for each in held.values()):
            return None  # finite until divided by a scale below 1
        if norm_read and any(each.finite and norm_of([each], divisor) == torch.inf for each in held.values()):
            return None  # only the squares are not finite
        called = self._called(optimizers)
        return tuple(Bad(called[name], each.kind, each.bad_elements) for name, each in held.items() if not each.finite)

    def _called(self, optimizers: Sequence[int]) -> dict[str, str]:
        """Returns what a result calls each parameter: its name in the model, or its place in the last optimizer."""
        return {
            name: name if self.setup.has_model else f"param_groups[{group}].params[{position}]"
            for index in optimizers
            for group, names in enumerate(self.groups[index])
            for position, name in enumerate(names)
        }

    def _step_unchecked(self, operation: ops.Step, names: Sequence[str]) -> Outcome:
        """Steps without any check, as `NoScaling` does."""
        held = self._held(names)
        norm_read = operation.norm or operation.clip_norm is not None
        norm = norm_of(held.values())
        self.rule.step(finite=True, loss_finite=True, amax=0.0, share=0.0, norm_read=False)
        self._apply(operation, held, norm)
        self.defined -= {name for name in held if self.masters_of(name)}
        # Sparse gradients are not coalesced here, so that sums are taken in another order.
        self.loose |= {name: LOOSE for name, gradient in held.items() if gradient.rows is not None}
        return Outcome(Status.APPLIED, 1.0, 1.0, norm if norm_read else None, None, 0, None)

    def _apply(self, operation: ops.Step, held: dict[str, Gradient], norm: float | None) -> None:
        """Clips the gradients and steps the optimizers."""
        coefficient = 1.0
        if operation.clip_norm is not None and norm is not None:
            # As `torch.nn.utils.clip_grad_norm_` computes it.
            coefficient = min(1.0, operation.clip_norm / (norm + 1e-6)) if norm == norm else 1.0
        for gradient in held.values():
            if coefficient != 1.0:
                gradient.values = times(gradient.values, coefficient)
            if operation.clip_value is not None:
                gradient.values = _clamped(gradient.values, operation.clip_value)
        for index in operation.optimizers:
            self._give(index)
            self.optimizers[index].step()
            self._keep_left_gradients(index)
            self._round_masters(index)
        if coefficient != 1.0 or self.setup.policy in INEXACT:
            names = self.names(operation.optimizers)
            self.loose = {name: LOOSE_HALF if self._multiplied_in_half(name) else LOOSE for name in names}

    def _make_momentum(self, index: int) -> None:
        """Gives fused SGD the momentum of parameters whose first gradient came later than that of others."""
        # torch 2.13 raises for a list in which some are missing. Zeros are exact without dampening, and gradscale makes
        # them; under `NoScaling` it only calls the optimizer.
        optimizer = self.optimizers[index]
        for group in optimizer.param_groups:
            if not (isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]):
                continue
            stepped = [leaf for leaf in group["params"] if leaf.grad is not None]
            missing = [leaf for leaf in stepped if optimizer.state[leaf].get("momentum_buffer") is None]
            torchs_own = group["dampening"] or not self.rule.scales
            if torchs_own and missing and len(missing) < len(stepped):
                raise TorchRaises("Fused SGD with momentum, and a first gradient later than others.")
            for leaf in [] if torchs_own else missing:
                optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)

    def _multiplied_in_half(self, name: str) -> bool:
        """Returns whether a gradient may be multiplied in 16 bits, as that of a 16-bit weight without masters is."""
        return self.gradient_dtype(name).itemsize < 4

    def _give(self, index: int) -> None:
        """Gives the gradients to the tensors that an optimizer steps."""
        self._adopt_written(index)
        given: dict[int, Tensor] = {}  # two parameters may have one gradient
        for name in self.names([index]):
            leaf, gradient = self.leaf(index, name), self.gradients.get(name)
            dtype = torch.float32 if name in self.masters[index] else self.gradient_dtype(name)
            leaf.grad = None if gradient is None else given.setdefault(id(gradient), gradient.as_torch(dtype))
        self._make_momentum(index)

    def _keep_left_gradients(self, index: int) -> None:
        """Takes over what an optimizer left in `.grad`: torch's foreach SGD adds its momentum there, for instance."""
        for name, gradient in self.gradients.items():
            if name in self.names([index]) and name not in self.masters[index] and gradient.rows is None:
                gradient.values = self.leaf(index, name).grad.to(gradient.values.dtype)  # type: ignore[union-attr]

    def _close(self, divided: Iterable[str] = ()) -> None:
        """Ends the window. Of the gradients, those in `divided` are unscaled now, but for 16-bit ones of masters."""
        self.window = None
        self._stale = set(self.gradients)
        self.defined = {name for name in divided if not self.masters_of(name)}

    # Masters.

    def _has_master(self, index: int, name: str) -> bool:
        return self.setup.optimizers[index].storage is not None and self.setup.parameter(name).is_half

    def _master(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.model.get_parameter(name).detach().float())

    @torch.no_grad()
    def _round_masters(self, index: int) -> None:
        """Rounds the masters of an optimizer into its weights, and notes the writes for other optimizers."""
        stepped = [name for name in self.names([index]) if name in self.gradients]
        for name in stepped:
            if name in self.masters[index]:
                self.model.get_parameter(name).copy_(self.masters[index][name])
        for other, written in enumerate(self._written):
            if other != index:
                written |= {name for name in stepped if name in self.masters[other]}

    @torch.no_grad()
    def _adopt_written(self, index: int) -> None:
        """Makes a weight that other code has written to the master."""
        for name in self._written[index]:
            master, weight = self.masters[index][name], self.model.get_parameter(name)
            keeps = self.setup.optimizers[index].storage == "fp32"
            kept = (master.to(weight.dtype) == weight) & keeps
            master.copy_(torch.where(kept, master, weight.float()))
        self._written[index] = set()

    def _keeps_half(self, names: Sequence[str]) -> bool:
        """Returns whether an optimizer with masters has FP16 gradients, which cannot be unscaled in place."""
        return any(self.masters_of(name) and self.gradient_dtype(name) is torch.float16 for name in names)

    def _held_twice(self, optimizers: Sequence[int]) -> list[int]:
        """Returns the optimizers that hold a gradient which they or another hold once more."""
        held = {
            index: [id(self.gradients[name]) for name in chain(*self.groups[index]) if name in self.gradients]
            for index in optimizers
        }
        count = Counter(chain(*held.values()))
        return [index for index, gradients in held.items() if any(count[each] > 1 for each in gradients)]

    # Clearing and editing gradients.

    @_run.register
    def _(self, operation: ops.ZeroGrad) -> Result:
        every = [parameter.name for parameter in self.setup.parameters]
        for name in every if operation.optimizer is None else self.names([operation.optimizer]):
            self._clear(name, set_to_none=operation.set_to_none)
        if self.window is not None and self.window.began and not self._touched:
            # The batch is abandoned: with its gradients, everything that was known of it is gone. Where zeros are left,
            # the window goes on at its scale.
            self.window.loss_finite, self.window.overflowed = True, False
            self.window.abandoned = not self.gradients
        return None

    def _clear(self, name: str, *, set_to_none: bool) -> None:
        self.defined.add(name)
        self._stale.discard(name)
        self._touched.discard(name)
        if self.window is not None:
            self.window.unscaled.discard(name)
        gradient = self.gradients.pop(name, None)
        if set_to_none:
            self._aliased.discard(name)
        if gradient is not None and not set_to_none:
            rows = None if gradient.rows is None else set()
            self.gradients[name] = Gradient(torch.zeros_like(gradient.values), rows)

    @_run.register
    def _(self, operation: ops.Unscaled) -> Result:
        names = self.names(operation.optimizers)
        if self.rule.scales:
            window = self.window
            if window is None or not window.began:
                return Refused()
            if self._stale & set(names):
                self._close()
                return Refused()
            if self._keeps_half(names):
                return Refused()
            held = self._held(names)
            fresh = {name: gradient for name, gradient in held.items() if name not in window.unscaled}
            window.as_made |= {name: replace(gradient) for name, gradient in fresh.items()}
            window.overflowed |= window.loss_finite and not self._all_finite(fresh)
            for name, gradient in fresh.items():
                gradient.values = rounded(gradient.values, 1.0, self.gradient_dtype(name))
            divided = {id(gradient) for gradient in fresh.values()}
            window.unscaled |= {name for name, gradient in self.gradients.items() if id(gradient) in divided}
        for inner in operation.inside:
            self._run(inner)
        return None

    @_run.register
    def _(self, operation: ops.Multiply) -> Result:
        if (gradient := self.gradients.get(operation.parameter)) is not None:
            gradient.values = times(gradient.values, operation.factor)
        return None

    @_run.register
    def _(self, operation: ops.Clamp) -> Result:
        if (gradient := self.gradients.get(operation.parameter)) is not None:
            window = self.window
            scaled = window is not None and operation.parameter not in window.unscaled
            bound = operation.bound / (window.scale if window is not None and scaled else 1.0)
            gradient.values = _clamped(gradient.values.nan_to_num(0.0, torch.inf, -torch.inf), bound)
        return None

    @_run.register
    def _(self, operation: ops.Poke) -> Result:
        gradient = self.gradients.get(operation.parameter)
        if gradient is not None and gradient.held.numel():
            row = 0 if gradient.rows is None else min(gradient.rows) * gradient.values.shape[1]
            count = gradient.held.numel() if gradient.rows is None else gradient.values.shape[1]
            gradient.values.view(-1)[row + operation.index % count] = operation.value
        return None

    @_run.register
    def _(self, operation: ops.ShareGradient) -> Result:
        if operation.source in self._stale:
            raise Undefined("A stale gradient becomes that of another parameter.")
        if self.window is not None and self.window.retries and operation.target not in self.gradients:
            raise Undefined("A retry does not know of a gradient that is set later, and refuses it.")
        if (gradient := self.gradients.get(operation.source)) is not None:
            self.gradients[operation.target] = gradient
            self.defined.discard(operation.target)
            self._touched.add(operation.target)
            self._aliased |= {operation.source, operation.target}
            if self.window is not None and operation.source in self.window.unscaled:
                self.window.unscaled.add(operation.target)
        return None

    # Changes of the model and the optimizers between steps.

    @_run.register
    def _(self, operation: ops.AddGroup) -> Result:
        index = operation.optimizer
        casts = [name for name in operation.parameters if self._has_master(index, name)]
        if self.setup.optimizers[index].grad_fp32 and self._stale & set(casts):
            raise Undefined("A stale gradient is cast to float32, and can no longer be recognised.")
        self.groups[index].append(list(operation.parameters))
        for name in operation.parameters:
            if self._has_master(index, name):
                self.masters[index][name] = self._master(name)
        leaves = [self.leaf(index, name) for name in operation.parameters]
        self.optimizers[index].add_param_group({"params": leaves})
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
        for masters, written in zip(self.masters, self._written, strict=True):
            if operation.parameter in masters:
                written.add(operation.parameter)
        return None

    @_run.register
    def _(self, operation: ops.WriteBuffer) -> Result:
        self.model.total.fill_(operation.value)
        return None

    def _settle_buffers(self, *, applied: bool) -> None:
        """Restores the buffers to what they were before the forward passes of a skipped step."""
        if self.setup.protects_buffers and not applied and self._before_forward is not None:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._before_forward[name])
        self._before_forward = None

    # Everything else.

    @_run.register
    def _(self, operation: ops.Evaluate) -> Result:
        return None

    @_run.register
    def _(self, operation: ops.Look) -> Result:
        return None

    @_run.register
    def _(self, operation: ops.Closure) -> Result:
        index, names = operation.optimizer, self.names([operation.optimizer])
        if self._keeps_half(names):
            return Refused()
        outcomes: list[Outcome] = []
        self.optimizers[index].step(lambda: self._evaluated(index, names, operation.batch, outcomes))
        self._keep_left_gradients(index)
        self._round_masters(index)
        if self.setup.policy in INEXACT:
            self.loose = dict.fromkeys(names, LOOSE)
        return outcomes[-1]

    def _evaluated(self, index: int, names: Sequence[str], batch: ops.Batch, outcomes: list[Outcome]) -> Tensor:
        """Evaluates the loss for an optimizer, leaves its gradients, and returns the loss."""
        for name in names:
            self._clear(name, set_to_none=True)
        loss_finite = self._forward(batch)
        with torch.no_grad():
            state = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            loss = self.model(batch)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state[name])
        window = self.window = Window(self.rule.scale, began=True, loss_finite=loss_finite)
        scales = self.rule.scales and loss_finite
        self._accumulate(self._attempts(batch, window, RETRIES if scales else 0), window.scale)
        held = self._held(names)
        outcome = self._decided(ops.Step((index,), norm=True), window, held)
        if not self.rule.scales and held:
            outcome = replace(outcome, status=Status.APPLIED, amax=None, culprits=None)
        # The gradients of a skipped evaluation are replaced by zeros, and nobody can count their elements later.
        culprits = outcome.culprits and tuple(replace(bad, count=None) for bad in outcome.culprits)
        outcomes.append(replace(outcome, culprits=culprits))
        if outcome.status is not Status.APPLIED:
            for gradient in held.values():
                gradient.values = torch.zeros_like(gradient.values)
        self._settle_buffers(applied=outcome.status is Status.APPLIED)
        self._close(held)
        self._give(index)
        return loss

    @_run.register
    def _(self, operation: ops.Save) -> Result:
        if operation.how in ("deepcopy", "pickle") and self.window is not None:
            return Refused()
        self.window = None
        if operation.how == "fresh scaler" and self._touched and not self.setup.has_model:
            raise Undefined("A scaler without a model cannot know gradients from before it was made.")
        if operation.how in ("in place", "fresh scaler"):
            self._stale |= self._touched
            self.defined -= self._touched
        else:
            # Neither copies of parameters nor new ones have gradients.
            for name in list(self.gradients):
                self._clear(name, set_to_none=True)
        if operation.how in ("fresh scaler", "checkpoint"):
            self._before_forward = None
        return None


def _clamped(values: Tensor, bound: float) -> Tensor:
    """Clamps every element; of a complex one, each of its two parts."""
    if values.is_complex():
        return torch.view_as_complex(torch.view_as_real(values).clamp(-bound, bound))
    return values.clamp(-bound, bound)
