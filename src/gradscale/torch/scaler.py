"""`LossScaler`: loss scaling for a PyTorch loop with no order to get wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Never

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # lazy: `torch.compiler.disable` imports the compiler, which takes a second
from torch.utils._pytree import tree_map

from gradscale._text import scaler_text
from gradscale.engine.guard import Guard, OnSkip
from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, Evidence, Health, OnStuck
from gradscale.engine.hints import OtherNames, explains_arguments, unknown_arguments
from gradscale.engine.metrics import summary_of
from gradscale.engine.probe_report import ProbeReport, Verdict
from gradscale.engine.saved import KEY, Saved, check_state, read_saved, replaces_policy, write_saved, write_text
from gradscale.kernels.torch import largest
from gradscale.peers import import_state
from gradscale.peers.specs import as_policy
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, Seen
from gradscale.record import settings_text
from gradscale.torch.checks import check_modules, check_optimizers, refuse_narrow
from gradscale.torch.gradients import Names, collect, local, numbers_of, parameters_of
from gradscale.torch.host import Facts, Rule, shown
from gradscale.torch.probing.automatic import AutomaticProbe
from gradscale.torch.probing.run import FRAMES, probe
from gradscale.torch.ranks.groups import note_loaded_policy
from gradscale.torch.ranks.pipeline import Pipeline, wrapped
from gradscale.torch.ranks.round import Rounds
from gradscale.torch.step.agree import Agreement, check_agree
from gradscale.torch.step.in_backward import InBackward
from gradscale.torch.step.result import Memory, StepResult, recorder_of
from gradscale.torch.step.run import Stages
from gradscale.torch.window.buffers import BufferGuard
from gradscale.torch.window.retry import backward_with_retries, check_backward, check_retriable, synchronizing
from gradscale.torch.window.window import Window, Windows, check_loss

Optimizer = torch.optim.Optimizer

RETRIES = 8
"""Lower scales that a closure tries. Its optimizer synchronizes for the loss anyway, and needs a gradient."""


class LossScaler(OtherNames):
    """Scales losses; unscales, checks, clips and applies their gradients in one call.

        scaler = LossScaler(model)
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            scaler.backward(loss)
            result = scaler.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()

    `step` with an optimizer that is not fused synchronizes with the device, once. With fused optimizers the next loss
    does, if what the step has measured is not in host memory by then.

    Args:
        model: the module, or modules, trained. Gives gradients their names; needed for `retries`. Stale gradients are
            found for its parameters, and for those of optimizers that were stepped before.
        policy: the rule for the scale, or its name as on the command line, such as `"dynamic:growth_interval=100"`.
            `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
        device: where the scale is kept; by default where the first loss is.
        group: process group whose ranks decide together; by default every rank of an initialized `torch.distributed`.
            `"alone"` is this process by itself, where ranks train separate models.
        distinct: the group over which plain parameters are distinct, such as the stages of a pipeline; or a mapping of
            modules and parameters, such as experts, to groups. All others are taken to be the same on every rank.
        agree: `"auto"` sends nothing to other ranks at a clean step under plain DDP, whose reduced gradients are the
            same everywhere; `"always"` sends a few numbers at every step, so that a gradient which one rank writes
            after the reduction is found, too.
        max_consecutive_skips: skipped steps in a row, with no lower scale left to try, before the run is stuck.
        on_stuck: `"raise"` a `ScaleStuck` at every step, or once until a step is applied again: `"warn"` with its text,
            or call a function with it. `"ignore"` does nothing.
        capturable: keep the state in one place on the device, so that a whole step can be captured in a CUDA graph,
            with fused optimizers and after a few steps that are not. Nothing is known on the host then until it is
            asked, which synchronizes; the run is checked for being stuck in `metrics`.
        record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
            `gradscale.recording`. Written by rank 0, or a file by each rank if its name has `{rank}`.
    """

    _adapter: ClassVar[str] = "torch"
    _join_config: Any = None

    @explains_arguments("LossScaler(model, policy={})")
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        policy: Policy | str = "auto",
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        distinct: Any = None,
        agree: Literal["auto", "always"] = "auto",
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "raise",
        capturable: bool = False,
        record: Any = None,
    ) -> None:
        self._modules = check_modules(model)
        self._names = Names(self._modules)
        at = None if device is None else torch.device(device)
        self._rule = Rule(as_policy(policy), device=at, capturable=capturable)
        self._rounds = Rounds(self._modules, group, distinct)
        self._agreement = Agreement(self._rounds, self._modules, always=check_agree(agree) == "always")
        self._memory = Memory(max_consecutive_skips, on_stuck, recorder_of(record, self._rule))
        self._windows = Windows(self._rule, self._names)
        self._stages = Stages(self._rule, self._names, self._agreement, self._memory, self._windows)
        self._last_probe: ProbeReport | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy or a pickle: everything but past steps.

        The model is part of it: copy both at once, as `copy.deepcopy((model, optimizer, scaler))`, or the copy has a
        model of its own, and knows neither names nor buffers of the one it is used with.
        """
        if self._windows.open is not None:
            raise RuntimeError(
                "A LossScaler can be copied or pickled between steps only, and a loss has been scaled since the last. "
                "Do it after `scaler.step(...)`, or save `scaler.state_dict()`."
            )
        return self.__dict__.copy()

    def __repr__(self) -> str:
        """Returns policy, scale, counts and the last step's status as text. Synchronizes with `capturable` only."""
        return scaler_text("LossScaler", [settings_text(self.policy)], self._rule.latest, self.last, shown)

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._rule.policy

    @property
    def loss_scale(self) -> Tensor:
        """The scale of the next loss, for losses that other code differentiates. Synchronizes as `scale` does."""
        return self._rule.scale if self._windows.open is None else self._windows.open.scale

    @property
    def last(self) -> StepResult | None:
        """The result of the last step; None before the first."""
        return self._memory.last

    @property
    def last_probe(self) -> ProbeReport | None:
        """The report of the last probe, whether by `probe` or by `probe_after`; None before the first."""
        return self._last_probe

    @_disable_dynamo
    def scale(self, outputs: Any) -> Any:
        """Returns a loss, or a nested structure of losses, times the scale.

        Every call until the next `step` uses the same scale. A loss narrower than float32 is widened first. The
        gradients of a backward pass that comes after that `step` get the scale of the next one. A loss that is not
        finite skips the step once its backward pass begins, unless all its gradients are cleared before the next.
        Synchronizes with the device only for the outcome of the last step with fused optimizers.
        """
        if not self._rule.reads.checks:
            return outputs
        if self._stages.pipeline is not None:
            self._stages.pipeline.refuse_scale()
        return self._windows.scaled(outputs) if isinstance(outputs, Tensor) else tree_map(self._windows.scaled, outputs)

    @_disable_dynamo
    def backward(self, loss: Tensor, retries: int = 0, **kwargs: Any) -> None:
        """Scales `loss` and runs its backward pass.

        With `retries`, an overflow lowers the scale and runs the backward pass, and only that, again: the batch is not
        lost. That costs a host read per attempt, a walk through the graph, and activations that are held until the pass
        has ended. Only the first backward pass of a step is run again; there is no retry while parameters hold
        gradients, for a loss that is not finite, under `Static`, or at the lowest scale. Post-accumulate hooks are
        called once, after the last attempt. With several ranks it is refused, except for DDP inside `no_sync()`, where
        ranks retry together.

        Args:
            loss: a scalar loss.
            retries: how often the backward pass may be run again.
            **kwargs: passed on to `Tensor.backward`.
        """
        if retries != 0:
            check_backward(retries, kwargs)
        if not self._rule.reads.checks:
            loss.backward(**kwargs)
            return
        if self._stages.pipeline is not None:
            self._stages.pipeline.refuse_scale()
        if not retries:
            self._windows.backward(loss, kwargs)
            return
        check_retriable(self._modules, self._rounds.ranks)
        self._backward_again(loss, retries, kwargs, parameters_of(self._windows.watched.optimizers))

    def _backward_again(self, loss: Tensor, retries: int, kwargs: dict[str, Any], owned: Sequence[Tensor]) -> None:
        """Runs the backward pass of `loss`, again at a lower scale while gradients of `owned` overflow."""
        self._windows.first_loss.note(loss, self.policy, "LossScaler")
        window = self._windows.begin(loss.device)
        watched = list(self._windows.watched)
        backward_with_retries(loss, window, self._rule, retries, self._rounds.any_rank, watched, owned, kwargs)
        self._windows.end_backward(window)

    @_disable_dynamo
    def step(
        self,
        *optimizers: Optimizer,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        norm: bool = False,
        **unknown: Never,
    ) -> StepResult:
        """Unscales, checks and clips the gradients, updates all the optimizers or none, and updates the scale.

        One read of the gradients; unscaling and clipping are one factor, folded into the kernel of a fused optimizer
        or multiplied in once. Afterwards `.grad` is unscaled and clipped; after a skipped step it is undefined and must
        be cleared. Synchronizes with the device, once, only if an optimizer is not fused or the scale is below 1.

        Args:
            *optimizers: all that share the backward passes since the last step.
            clip_norm: bound on the norm of all their gradients together, unscaled.
            clip_value: bound on the magnitude of every element, unscaled.
            norm: measure the norm for the result even if nothing is clipped.
            **unknown: none; a name that another library has for one of these is answered with theirs here.

        Raises:
            RuntimeError: nothing was scaled or no backward pass was run since the last step, gradients from before it
                were not cleared, or an optimizer has a kernel that is known to be wrong. Nothing has been changed then.
            ScaleStuck: step after step was skipped, and no lower scale is left to try.
            ScaleDesync: ranks have different scales.
        """
        if unknown:
            raise unknown_arguments("scaler.step", self.step, unknown)
        if self._rule.reads.checks:
            result = self._stages.run(optimizers, clip_norm, clip_value, norm=norm, join=self._join_config)
        else:
            result = self._stages.run_without_scaling(optimizers, clip_norm, clip_value, norm=norm)
        self._memory.keep(result, optimizers)
        return result

    def step_in_backward(self, *optimizers: Optimizer) -> None:
        """Steps `optimizers` in every backward pass from now on: each parameter as soon as it has its gradient.

            scaler.step_in_backward(*(torch.optim.AdamW([each], fused=True) for each in model.parameters()))

        A hook checks, unscales, applies and clears each gradient. A backward pass takes the place of `step`; `last` is
        its result. From the first gradient on that is not finite, no parameter is updated. Those before have been, and
        the step counts as skipped. Synchronizes as `step`, but once for each parameter where an optimizer is not fused.
        Not with clipping, accumulation, retries, several ranks or devices.
        """
        self._stages = self._stages if isinstance(self._stages, InBackward) else InBackward(self._stages)
        self._stages.register(optimizers)

    @_disable_dynamo
    def note(self, **numbers: float | Tensor) -> None:
        """Notes numbers of yours, such as `loss=loss`, for the record of the step that comes next.

        Each is one number, or a tensor of one, which is copied to the host meanwhile. Never synchronizes.
        """
        self._memory.note_numbers(self._rule.steps, numbers)

    @contextmanager
    def unscaled(self, *optimizers: Optimizer) -> Iterator[None]:
        """Unscales the gradients of `optimizers` for custom edits before `step`: noise, clips by layer, logs.

            with scaler.unscaled(optimizer):
                add_noise(model.parameters())
            scaler.step(optimizer)

        The gradients are checked before the edits and again by `step`, and an overflow before them still skips it.
        Each gradient is divided once, whatever number of optimizers and blocks it is in. Does not synchronize. All
        optimizers of the following `step` must be named. Ranks that share the scale must all call it.
        """
        check_optimizers(optimizers)
        if self.policy.needs:
            window, gradients = self._stages.ready(optimizers), collect(optimizers)
            rest = gradients if window.unscaled is None else window.unscaled.rest_of(gradients)
            self._stages.unscale(rest, window)
        yield

    @_disable_dynamo
    def grad(self, loss: Tensor, inputs: Tensor | Sequence[Tensor], **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Returns the unscaled gradients of `loss` by `inputs`, computed on the scaled loss: for gradient penalties.

        Gradients narrower than float32 are widened before they are divided by the scale. If they overflow, the next
        `step` is skipped and lowers the scale, even if the loss made from them is not finite, or none is made: the
        scale is too high for the batches to come, too. Synchronizes as `scale` does, and for gradients that are
        DTensors, of which each rank sees its own part: there all ranks agree.

        Args:
            loss: a scalar loss.
            inputs: the tensors to differentiate by.
            **kwargs: passed on to `torch.autograd.grad`, such as `create_graph=True`.
        """
        if not self.policy.needs:
            return torch.autograd.grad(loss, inputs, **kwargs)
        # A loss that is not finite counts only if one is made from its gradients and differentiated in turn.
        grads = torch.autograd.grad(self._windows.scaled(loss, counts=False), inputs, **kwargs)
        window = self._windows.get(loss.device)  # another one than that of the loss, if its batch was abandoned
        unscaled = tuple(None if grad is None else self._divided(grad, window) for grad in grads)
        present = [numbers_of(grad.detach()) for grad in unscaled if grad is not None]
        finite = torch.isfinite(local(loss.detach())).all()
        overflowed = ~torch.isfinite(largest(present, window.scale.device)).all() & finite.to(window.scale.device)
        if any(hasattr(grad, "to_local") for grad in unscaled):
            # One rank's shard has overflowed, and a loss made from all of them is then not finite on every rank.
            overflowed = torch.full_like(overflowed, self._rounds.any_rank(overflowed.reshape(1))[0])
        window.note_overflow(overflowed)
        return unscaled

    @staticmethod
    def _divided(grad: Tensor, window: Window) -> Tensor:
        """Returns a gradient divided by the scale, in float32 if it was narrower; differentiable."""
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        return wide * (1.0 / float(window.divisor)) if window.rule.multiplies else wide

    def closure(self, evaluate: Callable[[], Tensor], optimizer: Optimizer | None = None) -> Callable[[], Any]:
        """Returns a closure for optimizers that evaluate the loss themselves, such as LBFGS and SAM.

            optimizer.step(scaler.closure(lambda: loss_fn(model(x), y), optimizer))

        Each call clears the gradients, runs `evaluate` and its backward pass, and leaves unscaled gradients in `.grad`.
        An overflow lowers the scale and runs the backward pass again; if no scale helps, the gradients are zero, and
        LBFGS does not move (an optimizer with momentum does). `scaler.last` has the result. Synchronizes with the
        device, as these optimizers do.

        Args:
            evaluate: runs the forward pass and returns the loss: neither scaled nor differentiated.
            optimizer: whose parameters get the gradients; by default all of the model's.

        Raises:
            TypeError: the optimizer is a `MasterWeights` with FP16 gradients.
        """
        if self._rule.capturable:
            raise RuntimeError("A `closure` decides on the host. Build its scaler without `capturable=True`.")
        owner = optimizer
        if owner is None:
            if not self._modules:
                raise ValueError(
                    "`closure` needs parameters. Build the scaler as `LossScaler(model)` or pass the optimizer."
                )
            owner = torch.optim.SGD(dict.fromkeys(self._names.parameters()))  # holds them, and is never stepped
        parameters = parameters_of([owner])
        once = not self.policy.needs or self._rounds.ranks > 1 or any(map(synchronizing, self._modules))
        refuse_narrow("`closure`", [owner], self._names)

        def closure() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                loss = evaluate()
                self._windows.open = None
                self._backward_again(loss, 0 if once else RETRIES, {}, parameters)
            result = self._stages.run_in_closure(owner, parameters[0].device)
            self._memory.keep(result, [owner])
            # The optimizer computes with the gradients in any case, and inf or NaN would reach its state.
            for parameter in parameters if result.skipped() else ():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)  # not always of the parameter's own type
            return loss.detach()

        return closure

    def wrap_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `loss_fn` for a schedule of `torch.distributed.pipelining`. Call it on every rank.

            scaler = LossScaler(stage_module, distinct=pipeline_group)
            schedule = ScheduleGPipe(stage, n_microbatches, loss_fn=scaler.wrap_loss(loss_fn))
            schedule.step(x)  # on the last rank: schedule.step(target=y, losses=losses)
            scaler.step(optimizer, clip_norm=1.0)

        The gradients that leave the last stage are scaled, and `losses` are not. Stages without a loss take part in
        `step` with the scale that all ranks share. Calls by which the schedule finds out shapes are ignored. Does not
        synchronize.

        Args:
            loss_fn: takes the output of the last stage and the target, and returns the loss.
        """
        pipeline = self._stages.pipeline = self._stages.pipeline or Pipeline(self._windows, self._modules)

        def scaled(loss: Tensor) -> Tensor:
            check_loss(loss)
            self._windows.first_loss.note(loss, self.policy, "LossScaler")
            return pipeline.scaled(loss) if self.policy.needs else loss

        return wrapped(loss_fn, scaled, pipeline)

    def protect_buffers(self, *modules: nn.Module) -> None:
        """Restores the buffers of `modules`, by default of the model, whenever a step is skipped.

        BatchNorm's running statistics are updated by the forward pass, before it is known that the step will be
        skipped, and an overflow would stay in them. They go back to before the first forward pass, with gradients
        enabled, since the last step. Call it once. Does not synchronize.
        """
        if not (modules or self._modules):
            raise ValueError("`protect_buffers` needs modules. Build the scaler as `LossScaler(model)` or pass them.")
        self._stages.buffers.append(BufferGuard(check_modules(modules) or self._modules))

    def guard(self, *targets: Any, on_skip: OnSkip = "hold") -> Guard:
        """Returns an object whose `step()` advances schedulers and averages, or holds them when a step was skipped.

        Args:
            *targets: schedulers (`step`), averages (`update`), or functions of no arguments.
            on_skip: `"hold"` leaves them where they are on a skip, and synchronizes with the device; `"advance"` does
                neither.
        """
        return Guard(lambda: self.last, targets, on_skip)

    def join_hook(self, **kwargs: Any) -> Any:
        """Returns the hook with which torch's `Join([model, scaler])` lets a rank without batches follow the others."""
        from gradscale.torch.ranks.ddp import FollowingRank

        del kwargs
        return FollowingRank(self._follow)

    def _follow(self) -> None:
        """Follows a step of other ranks, without batches left."""
        if not self.policy.needs:  # every step is applied, and nothing is sent
            self._rule.follow(Facts(Seen()), lambda state: None)
        elif self._agreement.follow(self._rule, self.join_device, lambda state: None):
            self._memory.steps += 1

    @property
    def join_device(self) -> torch.device:
        """The device of what is sent inside `Join`."""
        return self._stages.device

    @property
    def join_process_group(self) -> Any:
        """The group of what is sent inside `Join`."""
        return self._rounds.group or torch.distributed.group.WORLD

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate, gradient norm and headroom. Never synchronizes: values may be a step old.

        NaN where a number is not known, or has not reached the host yet. `headroom_bits` is how often the
        scale could double before the largest parameter gradient overflows FP16.
        """
        return self._memory.metrics(self._rule.latest, check=self._rule.capturable)

    def summary(self) -> str:
        """Returns scale and skips as a short text for a progress bar, as in `scale 2^14, 3 skipped`."""
        return summary_of(self._rule.latest)

    def health(self) -> Health:
        """Returns how the run is doing: a condition, what to do, and the numbers behind it. Synchronizes.

        From the last step, the counters and the size of the weights, which it reads. The rate of skips is that since
        the last call. Rank 0 logs a line when the condition changes, and every ten minutes while the run is not
        healthy. Call it now and then, as once per epoch.
        """
        return self._memory.health(self._rule.state, **self._settings())

    def _evidence(self) -> Evidence:
        """Returns what is known of the run: what `health`, a probe and `ScaleStuck` conclude from. Synchronizes."""
        return replace(self._memory.evidence(self._rule.state), **self._settings())

    def _settings(self) -> dict[str, bool]:
        in_bf16 = self._windows.first_loss.in_bf16
        return {"scaling": bool(self.policy.needs), "in_bf16": in_bf16, "multiplies": self._rule.multiplies}

    def probe(
        self,
        step: Callable[[], Tensor],
        *,
        other: Callable[[], Tensor] | None = None,
        scale: float | None = None,
        frames: int = FRAMES,
    ) -> ProbeReport:
        """Runs a step again and returns the first operation whose result is not finite, and what to do about it.

            if result.skipped():
                print(scaler.probe(lambda: loss_fn(model(x), y)))

        As `gradscale.torch.probe`: looks at every operation of forward and backward pass, and finds a lower scale that
        fits if there is one. Model, gradients, buffers, torch's random numbers and this scaler are as before
        afterwards. Costs up to ten steps, and synchronizes at every operation. Ranks that share the scale must all
        call it.

        Args:
            step: runs the forward pass, with its autocast, and returns the loss: neither scaled nor differentiated.
            other: the same with another batch, to tell a bad batch from a bad model.
            scale: what the loss is multiplied by; by default the scale of the last step if that was skipped, else the
                scale of the next.
            frames: how many operations the report keeps.
        """
        if scale is None:
            skipped = self.last is not None and self.last.attempted and self.last.skipped()
            scale = float(self.last.scale if self.last is not None and skipped else self.loss_scale)
        self._last_probe = self._probed(step, other, scale, frames)
        return self._last_probe

    def probe_after(
        self,
        skips: int,
        step: Callable[[], Tensor],
        *,
        other: Callable[[], Tensor] | None = None,
        frames: int = FRAMES,
        on_report: Callable[[ProbeReport], object] = lambda report: None,
    ) -> None:
        """Probes by itself whenever `skips` steps in a row have been skipped. Call it once, before training.

            scaler.probe_after(3, lambda: loss_fn(model(x), y))
            for x, y in loader:
                ...
                scaler.step(optimizer)

        `step` is called in the middle of `scaler.step`, and finds the batch in the variables of the loop. The report is
        logged, at most every ten minutes if it says the same, and is in `last_probe`. Training goes on as if there had
        been no probe, also if `step` raises: that is logged, and there are no more automatic probes.

        Without such a row of skipped steps nothing is run, and nothing synchronizes with the device. There, steps that
        a fused optimizer skips are known one step late, and the batch of that next step is probed. Each row of
        skipped steps is probed once, and all probes together take about 1% of the time at most, the first aside. Ranks
        that share the scale must all call it. Not inside of torch's `Join`, nor for stages of a pipeline, which have no
        loss.

        Args:
            skips: skipped steps in a row.
            step: runs the forward pass on the present batch, with its autocast, and returns the loss: neither scaled
                nor differentiated.
            other: the same with another batch, to tell a bad batch from a bad model.
            frames: how many operations the report keeps.
            on_report: called with each report. What it raises ends training.

        Raises:
            TypeError: `step` is not a function.
            ValueError: the scaler was built without the model, or `skips` is not positive.
        """
        check_count("skips", skips)
        if not callable(step):
            raise TypeError(f"`step` must be a function that returns the loss. Received: {type(step).__name__}.")
        if not self._modules:
            raise ValueError("`probe_after` needs the model, whose state it restores. Build it as `LossScaler(model)`.")

        def run(step: Callable[[], Tensor], scale: float) -> ProbeReport:
            return self._probed(step, other, scale, frames)

        def keep(report: ProbeReport) -> None:
            self._last_probe = report
            on_report(report)

        automatic = AutomaticProbe(skips, step, run, self._rounds.any_rank, keep)

        def note(skipped: int, result: StepResult) -> None:
            # Inside of `Join`, ranks without batches take part in steps alone.
            if not getattr(self._join_config, "enable", False):
                automatic.note(skipped, result)

        self._memory.on_skips = note

    def _probed(
        self, step: Callable[[], Tensor], other: Callable[[], Tensor] | None, scale: float, frames: int
    ) -> ProbeReport:
        report = probe(
            step,
            *self._modules,
            scale=scale,
            other=other,
            frames=frames,
            seen=self._evidence,
            any_rank=self._rounds.any_rank,
        )
        if report.verdict is not Verdict.FINITE:
            self._memory.probed = f"A probe found {report.verdict}: {report.advice}", int(self._rule.state.skipped)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as one JSON text: all it takes to continue bit-exactly. Synchronizes."""
        saved = write_saved(self._rule.policy, self._rule.state, float(self._rule.catch_up().amax_ratio))
        return {KEY: write_text(saved)}

    def load_state_dict(self, mapping: Mapping[str, Any] | bytes, system: str | None = None) -> None:
        """Loads a saved policy and state, and discards gradients not yet stepped.

        The saved policy replaces the present one, which the log says if it is another. Nothing is loaded where only one
        of the two is `CheckOnly`: the run goes on in another format, and the log says that.

        Args:
            mapping: what `state_dict` returned; or the dict of torch's `GradScaler`; or another system's, or the bytes
                of its file.
            system: whose dict it is, as in `gradscale.import_state`, where it is neither of the first two.
        """
        if system is None and isinstance(mapping, Mapping) and "_growth_tracker" in mapping:
            system = "torch"
        if system is None:
            saved = read_saved(mapping)  # type: ignore[arg-type]
        else:
            saved = Saved(*import_state(system, mapping))
            check_state(saved.policy, saved.state)
        note_loaded_policy(self.policy, saved.policy)
        if not replaces_policy(self.policy, saved.policy):
            return
        self._rule.load(as_policy(saved.policy), saved.state, saved.amax_ratio)
        self._memory.forget()
        # Zeros, as `zero_grad(set_to_none=False)` leaves them, have no scale.
        self._windows.close(zeros=False)
