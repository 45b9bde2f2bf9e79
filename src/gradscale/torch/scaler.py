"""`LossScaler`: loss scaling for a PyTorch loop with no order to get wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscale.engine.decide import check_clip
from gradscale.engine.saved import write_saved
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS
from gradscale.policies.auto import as_policy
from gradscale.policies.contract import Policy
from gradscale.torch.accumulation.buffers import BufferGuard
from gradscale.torch.accumulation.closure import RETRIES, holder_of, make_closure
from gradscale.torch.accumulation.guard import Guard, OnSkip
from gradscale.torch.accumulation.retry import Retry, check_retries, retriable_parameters, synchronising
from gradscale.torch.accumulation.window import map_losses
from gradscale.torch.accumulation.windows import Windows
from gradscale.torch.checks import check_modules, check_optimizers, refuse_narrow, warn_of_half
from gradscale.torch.saved import read_saved
from gradscale.torch.step import apply
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Names, collect, parameters_of
from gradscale.torch.step.measure import measure
from gradscale.torch.step.remember import Memory, OnStuck
from gradscale.torch.step.result import StepResult
from gradscale.torch.step.step import Step, decided, upper_share
from gradscale.torch.step.unscaled_step import step_plainly

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
        on_stuck: `"raise"` a `ScaleStuck` at every step, or once until a step is applied again: `"warn"` with its text,
            or call a function with it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        policy: Policy | Literal["auto"] = "auto",
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "raise",
    ) -> None:
        self._modules = check_modules(model)
        self._names = Names(self._modules)
        self._rule = Rule(as_policy(policy), device=None if device is None else torch.device(device))
        self._agreement = Agreement(group)
        self._memory = Memory(max_consecutive_skips, on_stuck)
        self._windows = Windows(self._rule, self._names)
        self._buffers: list[BufferGuard] = []
        self._warned_of_half = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle holds: everything but the results and the gradients of past steps."""
        if self._windows.open is not None:
            raise RuntimeError(
                "A LossScaler can be copied or pickled between steps only, and a loss has been scaled since the last. "
                "Do it after `scaler.step(...)`, or save `scaler.state_dict()`."
            )
        return self.__dict__

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._rule.policy

    @property
    def loss_scale(self) -> Tensor:
        """What the next loss will be multiplied by: for losses that other code injects. Does not wait."""
        return self._rule.scale if self._windows.open is None else self._windows.open.scale

    @property
    def last(self) -> StepResult | None:
        """The result of the last step; None before the first."""
        return self._memory.last

    def scale(self, outputs: Any) -> Any:
        """Returns a loss, or a nested structure of losses, times the scale. Does not wait for the device.

        Every call until the next `step` uses the same scale. A loss narrower than float32 is widened first. One whose
        backward pass comes after that `step` is brought to the scale of its own.
        """
        if not self.policy.needs:
            return outputs
        return map_losses(lambda output: self._windows.get(output.device).scaled(output), outputs)

    def backward(self, loss: Tensor, retries: int = 0, **kwargs: Any) -> None:
        """Scales `loss` and runs its backward pass.

        With `retries`, an overflow lowers the scale and runs the backward pass, and only that, again: the batch is not
        lost, and gradients of earlier micro-batches are kept and brought to the new scale exactly. That costs a host
        read per attempt, a second set of gradients, and the graph's memory until `loss` is gone. There is no retry for
        a loss that is not finite, under `Static`, or at the lowest scale. Ranks that share the scale retry together.

        Args:
            loss: a scalar loss.
            retries: how often the backward pass may be run again.
            **kwargs: passed on to `Tensor.backward`.
        """
        check_retries(retries, kwargs)
        if retries and self.policy.needs:
            retry = self._retry(retriable_parameters(self._modules))
            retry.backward(loss, self._windows.get(loss.device), retries, kwargs)
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
        or multiplied in once. Afterwards `.grad` is unscaled and clipped; after a skipped step it is of no use and must
        be cleared. Waits for the device only if an optimizer is not fused, and then once.

        Args:
            *optimizers: all that share the backward passes since the last step.
            clip_norm: bound on the norm of all their gradients together, in true units.
            clip_value: bound on the magnitude of every element, in true units.
            norm: measure the norm for the result even if nothing is clipped.

        Raises:
            RuntimeError: nothing was scaled or no backward pass was run since the last step, or gradients from before
                are still there. Nothing has been changed then.
            ScaleStuck: step after step was skipped, and no lower scale is left to try.
        """
        check_optimizers(optimizers)
        check_clip("clip_norm", clip_norm)
        check_clip("clip_value", clip_value)
        wants_norm = norm or clip_norm is not None
        if not self.policy.needs:
            result = step_plainly(self._rule, optimizers, self._names, clip_norm, clip_value, norm=wants_norm)
            self._memory.last = result
            return result
        window, sizes = self._windows.ready(optimizers), self._memory.wants_amax
        if clip_value is not None:
            refuse_narrow("clip_value", optimizers, self._names)
        divide = clip_value is None and not any(map(apply.folds, optimizers))
        asked = {"norm": wants_norm, "sizes": sizes, "divide": divide}
        try:
            step = decided(self._rule, self._agreement, optimizers, window, clip_norm, **asked)
            if sizes and not self._warned_of_half:
                self._warned_of_half = warn_of_half(step.gradients, self._names)
            went = apply.apply_all(
                optimizers, step.gradients, step.outcome.applied, step.outcome.factor, clip_value, divided=step.divided
            )
        except BaseException:
            # Some gradients may be divided by now: another step would divide them again.
            self._windows.close(optimizers)
            raise
        return self._close(step.with_sizes() if step.divided and not went else step, norm=wants_norm)

    @contextmanager
    def unscaled(self, *optimizers: Optimizer) -> Iterator[None]:
        """Makes the gradients of `optimizers` true, for edits of your own before `step`: noise, clips by layer, logs.

            with scaler.unscaled(optimizer):
                add_noise(model.parameters())
            scaler.step(optimizer)

        The gradients are checked before the edits and again by `step`, and an overflow before them still skips it.
        Does not wait for the device. All optimizers of the following `step` must be named.
        """
        check_optimizers(optimizers)
        if self.policy.needs:
            window = self._windows.ready(optimizers)
            refuse_narrow("unscaled", optimizers, self._names)
            scaled = [optimizer for optimizer in optimizers if id(optimizer) not in window.true_units]
            values = collect(scaled).values
            measured = measure(values, window.scale.device, norm=False)
            share = upper_share(self.policy, values, window.scale)
            window.note_overflow(~measured.finite(window.scale))
            apply.multiply(values, 1.0 / window.scale)
            window.note_unscaled(scaled, measured.amax / window.scale, share, sum(map(Tensor.numel, values)))
        yield

    def grad(self, loss: Tensor, inputs: Tensor | Sequence[Tensor], **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Returns the true gradients of `loss` by `inputs`, computed on the scaled loss: for gradient penalties.

        Gradients narrower than float32 are widened before they are divided by the scale. If they overflow, the next
        `step` is skipped and lowers the scale, whatever became of a loss made from them. Does not wait for the device.

        Args:
            loss: what to differentiate.
            inputs: by what.
            **kwargs: passed on to `torch.autograd.grad`, such as `create_graph=True`.
        """
        if not self.policy.needs:
            return torch.autograd.grad(loss, inputs, **kwargs)
        window = self._windows.get(loss.device)
        grads = torch.autograd.grad(window.scaled(loss), inputs, **kwargs)
        true = tuple(None if grad is None else window.true(grad) for grad in grads)
        present = [grad.detach() for grad in true if grad is not None]
        window.note_overflow(~torch.isfinite(measure(present, window.scale.device, norm=False).total))
        return true

    def closure(self, evaluate: Callable[[], Tensor], optimizer: Optimizer | None = None) -> Callable[[], Any]:
        """Returns a closure for optimizers that evaluate the loss themselves, such as LBFGS and SAM.

            optimizer.step(scaler.closure(lambda: loss_fn(model(x), y), optimizer))

        Each call clears the gradients, runs `evaluate` and its backward pass, and leaves true gradients in `.grad`. An
        overflow lowers the scale and runs the backward pass again; if no scale helps, the gradients are zero, and LBFGS
        stays where it is (an optimizer with momentum does not). `scaler.last` tells. Waits for the device, as these
        optimizers do.

        Args:
            evaluate: runs the forward pass and returns the loss: neither scaled nor differentiated.
            optimizer: whose parameters get the gradients; by default all of the model's.
        """
        owner = holder_of(self._modules) if optimizer is None else optimizer
        parameters = list(parameters_of([owner]))
        once = not self.policy.needs or any(map(synchronising, self._modules))

        def backward(loss: Tensor) -> None:
            self._windows.open = None
            window = self._windows.get(loss.device)
            self._retry(parameters).backward(loss, window, 0 if once else RETRIES, {})

        def settle() -> StepResult:
            window = self._windows.get(parameters[0].device)
            step = decided(self._rule, self._agreement, [owner], window, norm=True)
            apply.multiply(step.gradients.values, torch.where(step.outcome.applied, step.outcome.factor, 1.0))
            return self._close(step, norm=True)

        return make_closure(evaluate, parameters, backward, settle)

    def protect_buffers(self, *modules: nn.Module) -> None:
        """Restores the buffers of `modules`, by default of the model, whenever a step is skipped.

        BatchNorm's running statistics are updated by the forward pass, before anyone knows that the step will be
        skipped; an overflow would stay in them for good. Call it once. Does not wait for the device.
        """
        if not (modules or self._modules):
            raise ValueError("`protect_buffers` needs modules. Build the scaler as `LossScaler(model)` or pass them.")
        self._buffers.append(BufferGuard(check_modules(modules) or self._modules))

    def guard(self, *targets: Any, on_skip: OnSkip = "hold") -> Guard:
        """Returns an object whose `step()` advances schedulers and averages, or holds them when a step was skipped.

        Args:
            *targets: schedulers (`step`), averages (`update`), or functions of no arguments.
            on_skip: `"hold"` leaves them where they are on a skip, and waits for the device; `"advance"` does neither.
        """
        return Guard(lambda: self.last, targets, on_skip)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, true gradient norm and headroom. Never waits: values may be a step old.

        Empty where nothing has reached the host yet; NaN where a number is not known. `headroom_bits` is how often the
        scale could double before the largest parameter gradient overflows FP16.
        """
        return self._memory.metrics(self._rule.state)

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
        self._rule.load(as_policy(policy), state)
        self._memory.forget()
        self._windows.close()

    def _retry(self, parameters: Sequence[Tensor]) -> Retry:
        return Retry(parameters, self._rule, self._agreement.any_rank)

    def _close(self, step: Step, *, norm: bool) -> StepResult:
        """Ends the window: moves the scale, settles buffers, remembers what was left, and returns the result."""
        self._rule.state = step.outcome.state
        for guard in self._buffers:
            guard.settle(step.outcome.applied)
        result = step.result(self._rule, self._names, norm=norm)
        self._windows.close(step.optimizers)
        self._memory.keep(result, step.outcome.state, step.seen.amax if step.measured.told_sizes else None)
        return result
