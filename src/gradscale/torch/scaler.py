"""`LossScaler`: loss scaling for a PyTorch loop with no order to get wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscale.policy import Policy
from gradscale.predictive import Headroom
from gradscale.state import Outcome, Seen
from gradscale.torch import apply
from gradscale.torch.agree import Agreement
from gradscale.torch.buffers import BufferGuard
from gradscale.torch.checks import (
    check_clip,
    check_optimizers,
    check_order,
    refuse_leftovers,
    refuse_shared,
    warn_of_half,
)
from gradscale.torch.closure import make_closure
from gradscale.torch.gradients import Gradient, collect
from gradscale.torch.guard import Guard, OnSkip
from gradscale.torch.measure import Measured, measure
from gradscale.torch.remember import Memory, OnStuck
from gradscale.torch.result import StepResult
from gradscale.torch.retry import backward_with_retries, retriable_parameters
from gradscale.torch.rule import Rule
from gradscale.torch.saved import read_saved, write_saved
from gradscale.torch.window import LeftoverWatch, Window, map_tensors

Optimizer = torch.optim.Optimizer


class LossScaler:
    """Scales losses; unscales, checks, clips and applies their gradients in one call.

        scaler = LossScaler(model)
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            scaler.backward(loss)
            result = scaler.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()

    Nothing here waits for the device, except `step` with an optimizer that has no fused kernel: that reads one flag.

    Args:
        model: the module, or modules, trained. Gives gradients their names; needed for `retries`.
        policy: the rule for the scale. `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
        device: where the scale lives; by default where the first loss does.
        group: process group whose ranks decide together; by default every rank of an initialised `torch.distributed`.
        max_consecutive_skips: skipped steps in a row, with no lower scale left to try, before the run is stuck.
        on_stuck: `"raise"` a `ScaleStuck`, `"warn"` with its text, or call a function with it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        policy: Policy | Literal["auto"] = "auto",
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        max_consecutive_skips: int = 50,
        on_stuck: OnStuck = "raise",
    ) -> None:
        self._modules = [model] if isinstance(model, nn.Module) else list(model or ())
        self._names = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        self._rule = Rule(_as_policy(policy), device=None if device is None else torch.device(device))
        self._agreement = Agreement(group)
        self._memory = Memory(max_consecutive_skips, on_stuck)
        self._leftovers = LeftoverWatch()
        self._buffers: list[BufferGuard] = []
        self._window: Window | None = None
        self._true_units: set[int] = set()
        self._amax = torch.zeros(())
        self._warned_of_half = False

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._rule.policy

    @property
    def loss_scale(self) -> Tensor:
        """What the next loss will be multiplied by: for losses that other code injects. Does not wait."""
        return torch.as_tensor(self._rule.state.scale)

    @property
    def last(self) -> StepResult | None:
        """The result of the last step; None before the first."""
        return self._memory.last

    def scale(self, outputs: Any) -> Any:
        """Returns a loss, or a nested structure of losses, times the scale. Does not wait for the device.

        Every call until the next `step` uses the same scale. A loss narrower than float32 is widened first.
        """
        if not self.policy.needs:
            return outputs
        return map_tensors(lambda output: self._open_window(output.device).scaled(output), outputs)

    def backward(self, loss: Tensor, retries: int = 0, **kwargs: Any) -> None:
        """Scales `loss` and runs its backward pass.

        With `retries`, an overflow lowers the scale and runs the backward pass, and only that, again: the batch is not
        lost, and gradients of earlier micro-batches are kept and brought to the new scale exactly. That costs a host
        read per attempt, a second set of gradients, and the graph's memory until `loss` is gone. There is no retry for
        a loss that is not finite, under `Static`, or at the lowest scale.

        Args:
            loss: a scalar loss.
            retries: how often the backward pass may be run again.
            **kwargs: passed on to `Tensor.backward`.
        """
        if retries and self.policy.needs:
            parameters = retriable_parameters(self._modules)
            backward_with_retries(loss, self._open_window(loss.device), self._rule, parameters, retries, kwargs)
        else:
            self.scale(loss).backward(**kwargs)

    def step(
        self,
        *optimizers: Optimizer,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        norm: bool = False,
    ) -> StepResult:
        """Unscales, checks and clips the gradients, updates all the optimizers or none, and moves the scale.

        One read of the gradients; unscaling and clipping are one factor, folded into the kernel of a fused optimizer
        or multiplied in once. Afterwards `.grad` is unscaled and clipped; after a skipped step it is still scaled and
        must be cleared. Waits for the device only if an optimizer is not fused, and then once.

        Args:
            *optimizers: all that share the backward passes since the last step.
            clip_norm: bound on the norm of all their gradients together, in true units.
            clip_value: bound on the magnitude of every element, in true units.
            norm: measure the norm for the result even if nothing is clipped.

        Raises:
            RuntimeError: nothing was scaled or no backward pass was run since the last step, or gradients from before
                are still there. Nothing has been changed then.
        """
        check_optimizers(optimizers)
        check_clip("clip_norm", clip_norm)
        check_clip("clip_value", clip_value)
        window = self._ready_window(optimizers)
        refuse_shared(optimizers, self._names)
        gradients = collect(optimizers, self._names)
        self._warned_of_half = self._warned_of_half or warn_of_half(gradients)
        measured = self._measure(gradients, norm=norm or clip_norm is not None)
        outcome, seen = self._decide(measured, window, optimizers, gradients, clip_norm)
        apply.apply_all(optimizers, gradients, outcome.applied, outcome.factor, clip_value)
        return self._close(window, optimizers, gradients, measured, outcome, seen)

    @contextmanager
    def unscaled(self, *optimizers: Optimizer) -> Iterator[None]:
        """Makes the gradients of `optimizers` true, for edits of your own before `step`: noise, clipping by layer, logs.

            with scaler.unscaled(optimizer):
                add_noise(model.parameters())
            scaler.step(optimizer)

        The gradients are checked before the edits and again by `step`, and an overflow before them still skips it.
        Does not wait for the device. All optimizers of the following `step` must be named.
        """
        check_optimizers(optimizers)
        window = self._ready_window(optimizers)
        gradients = collect(optimizers, self._names)
        measured = self._measure(gradients, norm=False)
        window.note_overflow(~torch.isfinite(measured.total / window.scale))
        apply.multiply(gradients, 1.0 / window.scale)
        self._true_units.update(id(optimizer) for optimizer in optimizers)
        yield

    def grad(self, loss: Tensor, inputs: Tensor | Sequence[Tensor], **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Returns the true gradients of `loss` by `inputs`, computed on the scaled loss: for gradient penalties.

        If they overflow, the next `step` is skipped and lowers the scale, whatever became of a loss made from them.
        Does not wait for the device.

        Args:
            loss: what to differentiate.
            inputs: by what.
            **kwargs: passed on to `torch.autograd.grad`, such as `create_graph=True`.
        """
        grads = torch.autograd.grad(self.scale(loss), inputs, **kwargs)
        if self._window is None:
            return grads
        window = self._window
        true = [None if grad is None else grad * (1.0 / window.scale).to(grad.device) for grad in grads]
        present = [grad.detach() for grad in true if grad is not None]
        window.note_overflow(~torch.isfinite(measure(present, window.scale.device, norm=False).total))
        return tuple(true)

    def closure(self, evaluate: Callable[[], Tensor], optimizer: Optimizer) -> Callable[[], Tensor]:
        """Returns a closure for optimizers that evaluate the loss themselves, such as LBFGS.

            optimizer.step(scaler.closure(lambda: loss_fn(model(x), y), optimizer))

        Each call clears the gradients, runs `evaluate` and its backward pass, and leaves true gradients in `.grad`. An
        overflow lowers the scale and runs the backward pass again; if no scale helps, the gradients are zero and the
        optimizer stays where it is. `scaler.last` tells. Waits for the device, as these optimizers do.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def backward(loss: Tensor, retries: int) -> None:
            window = self._window = self._new_window(loss.device)
            backward_with_retries(loss, window, self._rule, parameters, retries if self.policy.needs else 0, {})

        def settle() -> StepResult:
            window = self._open_window(parameters[0].device)
            gradients = collect([optimizer], self._names)
            measured = self._measure(gradients, norm=True)
            outcome, seen = self._decide(measured, window, [optimizer], gradients, None)
            apply.multiply(gradients, torch.where(outcome.applied, outcome.factor, 1.0))
            return self._close(window, [optimizer], gradients, measured, outcome, seen)

        return make_closure(evaluate, parameters, backward, settle)

    def protect_buffers(self, *modules: nn.Module) -> None:
        """Restores the buffers of `modules`, by default of the model, whenever a step is skipped.

        BatchNorm's running statistics are updated by the forward pass, before anyone knows that the step will be
        skipped; an overflow would stay in them for good. Call it once. Does not wait for the device.
        """
        if not (modules or self._modules):
            raise ValueError("`protect_buffers` needs modules. Build the scaler as `LossScaler(model)` or pass them.")
        self._buffers.append(BufferGuard(modules or self._modules))

    def guard(self, *targets: Any, on_skip: OnSkip = "hold") -> Guard:
        """Returns an object whose `step()` advances schedulers and averages, or holds them when a step was skipped.

        Args:
            *targets: schedulers (`step`), averages (`update`), or functions of no arguments.
            on_skip: `"hold"` leaves them where they are on a skip, and waits for the device; `"advance"` does neither.
        """
        return Guard(lambda: self.last, targets, on_skip)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, true gradient norm and headroom. Never waits: values may be a step old.

        Empty where nothing has reached the host yet. `headroom_bits` is how often the scale could double before the
        largest parameter gradient overflows FP16.
        """
        self._rule.settle(torch.device("cpu"))
        return self._memory.metrics(self._rule.state, self._amax)

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as plain values: all it takes to go on bit for bit. Waits for the device."""
        return write_saved(self._rule.policy, self._rule.state)

    def load_state_dict(self, mapping: Mapping[str, Any], system: str | None = None) -> None:
        """Takes over a saved policy and state, and forgets gradients not yet stepped.

        Args:
            mapping: what `state_dict` returned; or the dict of torch's `GradScaler`; or another system's.
            system: whose dict it is, as in `gradscale.import_state`, where it is neither of the first two.
        """
        policy, state = read_saved(mapping, system)
        self._rule = Rule(policy, state, self._rule.device)
        self._window = None

    def _open_window(self, device: torch.device) -> Window:
        if self._window is None:
            self._window = self._new_window(device)
        return self._window

    def _new_window(self, device: torch.device) -> Window:
        self._rule.settle(device)
        return Window(self._rule.state.scale, self._leftovers.uncleared)

    def _ready_window(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are to be used, or says what is wrong with the order of calls."""
        if not self.policy.needs:
            return self._open_window(optimizers[0].param_groups[0]["params"][0].device)
        window = check_order(self._window)
        try:
            refuse_leftovers(window, optimizers, self._names)
        except RuntimeError:
            self._window = None
            raise
        return window

    def _measure(self, gradients: Sequence[Gradient], *, norm: bool) -> Measured:
        """Returns one read of the gradients: norms, unless the policy wants the largest magnitude and nobody a norm."""
        values = [gradient.values for gradient in gradients]
        return measure(values, self._rule.state.scale.device, norm=norm or "amax" not in self.policy.needs)

    def _decide(
        self,
        measured: Measured,
        window: Window,
        optimizers: Sequence[Optimizer],
        gradients: Sequence[Gradient],
        clip_norm: float | None,
    ) -> tuple[Outcome, Seen]:
        """Returns the decision of every rank together, and what it was made from. The factor fits the gradients."""
        in_true_units = self._in_true_units(optimizers)
        unit = torch.ones_like(window.scale) if in_true_units else window.scale
        total = measured.total / unit
        finite = torch.isfinite(total) & ~window.overflowed
        seen = Seen(
            finite=finite,
            loss_finite=window.loss_finite | window.overflowed,
            amax=torch.where(finite, measured.amax / unit, 0.0),
            norm=total,
        )
        seen = self._agreement.over_ranks(seen)
        if not gradients and self._agreement.ranks == 1:
            return Outcome(self._rule.state, torch.zeros_like(finite), unit), seen
        outcome = self._rule.decide(seen, clip_norm)
        return replace(outcome, factor=outcome.factor * (window.scale / unit)), seen

    def _in_true_units(self, optimizers: Sequence[Optimizer]) -> bool:
        """Returns whether `unscaled` has made these gradients true already."""
        done = [id(optimizer) in self._true_units for optimizer in optimizers]
        if any(done) and not all(done):
            raise RuntimeError(
                "`step` needs all its optimizers inside the same `unscaled(...)` block, or none of them. "
                "Name every optimizer of the step there."
            )
        return all(done)

    def _close(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        gradients: Sequence[Gradient],
        measured: Measured,
        outcome: Outcome,
        seen: Seen,
    ) -> StepResult:
        """Ends the window: settles buffers, remembers what was left, and returns the result."""
        result = StepResult(
            applied=outcome.applied,
            scale=window.scale,
            next_scale=outcome.state.scale,
            loss_finite=seen.loss_finite,
            measured=measured,
            gradients=gradients,
            grad_norm=seen.norm if measured.is_norm else None,
            retries=window.retries,
        )
        for guard in self._buffers:
            guard.settle(outcome.applied)
        self._amax = seen.amax
        self._window = None
        self._true_units.clear()
        self._leftovers.remember(optimizers)
        self._memory.keep(result, outcome.state)
        return result


def _as_policy(policy: Policy | Literal["auto"]) -> Policy:
    if isinstance(policy, str):
        if policy != "auto":
            raise ValueError(f"`policy` must be 'auto' or a policy. Received: policy={policy!r}.")
        return Headroom()
    if not (hasattr(policy, "next") and hasattr(policy, "start")):
        raise TypeError(f"`policy` must be 'auto' or a policy. Received: {type(policy).__name__}.")
    return policy
