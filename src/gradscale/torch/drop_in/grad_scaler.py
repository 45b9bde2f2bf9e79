"""`GradScaler`: a drop-in for torch's own, with its faults fixed and a result for every step."""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo  # which makes a graph break where `torch.compile` traces a loop
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradscale._text import scaler_text
from gradscale.engine.decide import check_clip
from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, Health, OnStuck, callers_level
from gradscale.engine.hints import OtherNames, explains_arguments
from gradscale.engine.metrics import summary_of
from gradscale.engine.saved import replaces_policy
from gradscale.kernels.torch import CPU
from gradscale.peers import torch_rule
from gradscale.peers.specs import as_policy
from gradscale.peers.torch_rule import TorchRule
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.record import settings_text
from gradscale.torch import host
from gradscale.torch.bf16 import FirstLoss
from gradscale.torch.drop_in import refusals, settings
from gradscale.torch.drop_in.updates import VIEWS, WRITTEN, DropInWindow, Merged, Noted, View, noted_in, view_of
from gradscale.torch.fused_sgd import fault_of_fused_sgd
from gradscale.torch.gradients import collect, count_elements, parameters_of
from gradscale.torch.host import Facts, Rule, filled, shown, to_device
from gradscale.torch.ranks.groups import note_loaded_policy
from gradscale.torch.ranks.round import Rounds
from gradscale.torch.step import apply
from gradscale.torch.step.agree import agreed_by, send_round
from gradscale.torch.step.apply import Gate, StepPlan, plan_step
from gradscale.torch.step.measure import measure, measure_sizes, merged_flag, multiply_and_check, one, seen_here
from gradscale.torch.step.on_device import merged_on_device, plan_on_device, seen_on_device
from gradscale.torch.step.result import Memory, StepResult, Traces, recorder_of
from gradscale.torch.window.retry import backward_with_retries, check_backward

Optimizer = torch.optim.Optimizer

STUCK_AT = 1.0
"""Scale at or below which a lower one is not expected to help: the gradients do not fit into FP16 unscaled."""


class GradScaler(torch.amp.GradScaler, OtherNames):
    """A drop-in for `torch.amp.GradScaler`: change the import, keep the loop.

        scaler = GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.last.skipped():
                print(scaler.last.culprits())

    It has torch's arguments, methods, errors and `state_dict`, and torch's scaler loads what this one saves. Where
    torch's lets a non-finite number reach a weight, or does not recover from one, this one skips the step and recovers.

    Args:
        device: type of the device.
        init_scale: scale of the first step.
        growth_factor: factor by which the scale is multiplied when it grows.
        backoff_factor: factor by which the scale is multiplied when it backs off.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False makes every method do nothing, and `step` just call the optimizer's.
        policy: a rule for the scale, or its name, instead of the four numbers above. It keeps the scale after a loss
            that is not finite, where torch's rule backs off. `NoScaling()` is the same as `enabled=False`.
        min_scale: lowest scale; by default 2**-126.
        max_scale: highest scale; by default the largest float32.
        hysteresis: overflows before the scale backs off for the first time.
        max_consecutive_skips: skipped steps in a row, at a scale of at most 1 or with a loss that is not finite, before
            the run is stuck.
        on_stuck: what to do then. `"warn"`, once until a step is applied again, with the likely cause; or `"raise"` a
            `ScaleStuck` in every `update`, call a function with it once, or `"ignore"` it.
        group: the ranks that decide together at every step, a process group: needed where plain gradients differ by
            rank, as those of the stages of a pipeline do. By default every rank where a parameter is a DTensor, and
            none where all are plain; `"alone"` never any.
        capturable: keep the state in one place on the device, so that a whole step can be captured in a CUDA graph, as
            with `gradscale.torch.LossScaler`.
        record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
            `gradscale.recording`. Written by rank 0, or a file by each rank if its name has `{rank}`.

    Attributes:
        last: the result of the last `step`; None before the first, when disabled, and for an optimizer that takes the
            scaler as an argument. Its `next_scale` is set by `update`.
    """

    _adapter: ClassVar[str] = "torch drop-in"
    _unscales_half: ClassVar[bool] = False

    @explains_arguments("GradScaler")
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "warn",
        group: Any = None,
        capturable: bool = False,
        record: Any = None,
    ) -> None:
        settings.check_device(device)
        factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
        numbers = {"init_scale": init_scale, **factors}
        extra = {"min_scale": min_scale, "max_scale": max_scale, "hysteresis": hysteresis}
        if policy is not None:
            policy = as_policy(policy)
            torch_rule.refuse_second_rule(numbers | extra)
        # Without the numbers: torch's own checks, which differ between its versions, are among those below.
        self._views = {name: View() for name in VIEWS}
        super().__init__(device, enabled=enabled and (policy is None or bool(policy.needs)))
        self._rounds, self._always_agrees = Rounds(group=group), group is not None
        self._first_loss = FirstLoss()
        self._clips: dict[str, Any] = {}  # the last bounds, which were checked
        self._warned_of_fused_sgd = False
        rule: Policy = TorchRule(init_scale=1.0)
        if self._enabled:
            rule = torch_rule.rule_of(numbers, **extra) if policy is None else policy
            known = rule if isinstance(rule, Dynamic | TorchRule) else TorchRule(init_scale=float(rule.start().scale))
            for name in numbers:
                setattr(self, f"_{name}", getattr(known, name))
            self._init_growth_tracker = int(rule.start().clean_steps)
        self._rule = Rule(rule, capturable=capturable)
        self._memory = Memory(max_consecutive_skips, on_stuck, recorder_of(record if enabled else None, self._rule))
        self.last: StepResult | None = None
        self._window: DropInWindow | None = None

    def __repr__(self) -> str:
        """Returns scale, counts and the status of the last step as text. Synchronizes with `capturable` only."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        policy, defaults = self._rule.policy, torch_rule.FACTORS
        about = [settings_text(policy)]
        if isinstance(policy, TorchRule):  # what is not torch's default
            changed = [name for name, value in defaults.items() if getattr(policy, name) != value]
            about = [f"{name}={torch_rule.shown(getattr(policy, name))}" for name in changed]
        return scaler_text(type(self).__name__, about, self._rule.latest, self.last, shown)

    # torch's two tensors: a view of the rule's state.
    _scale: Any = view_of("scale")
    _growth_tracker: Any = view_of("clean_steps")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._rule.device = dev
        scale, tracker = np.float32(self._init_scale), np.int32(self._init_growth_tracker)
        self._set_state(replace(self._rule.state, scale=scale, clean_steps=tracker))
        for view, number in zip(self._views.values(), (float(scale), float(tracker)), strict=True):
            view.number, view.version = number, view.tensor._version  # type: ignore[union-attr]  # not to be read

    def _take_over(self, method: str | None = None) -> None:
        """Makes what other code has written to torch's tensors the state of the rule. Synchronizes if there is any.

        Raises torch's error in a `method` that needs the two, if no loss was ever scaled or other code has removed one.
        """
        if method is not None and any(view.tensor is None for view in self._views.values()):
            self._check_scale_growth_tracker(method)
        written: dict[str, Any] = {}
        for name, view in self._views.items():
            if view.tensor is not None and (view.number is None or view.version != view.tensor._version):
                number, known = view.tensor.item(), view.number
                view.number, view.version = number, view.tensor._version
                if number != known:
                    written[name] = VIEWS[name](number)
        if written:
            found, (lowest, highest) = replace(self._rule.state, **written), torch_rule.bounds_of(self._rule.policy)
            self._set_state(replace(found, scale=np.float32(min(max(float(found.scale), lowest), highest))))

    def _state(self) -> ScaleState:
        """Returns the state of the rule, with what other code has written to torch's tensors."""
        self._take_over()
        return self._rule.state

    def _set_state(self, state: ScaleState) -> None:
        """Sets the state to one that no step has led to, from which the present window goes on."""
        self._rule.state = state
        if (window := self._window) is not None:
            window.start, window.ahead, window.steps = self._rule.catch_up(), self._rule.ahead, self._rule.steps
            if not window.updated:  # as in torch, what others set divides
                window.scale, window.divisor = self._rule.scale_of(state), np.float32(state.scale)

    def _open(self, device: torch.device = CPU) -> DropInWindow:
        """Returns the window of the gradients that are made now: a new one after an `update`."""
        if self._views["scale"].tensor is None:
            self._lazy_init_scale_growth_tracker(device)
        window = self._window
        if window is None or window.updated or (self._rule.capturable and not window.passes):  # as `Windows.get`
            self._take_over()
            window = self._window = DropInWindow(self._rule)
        return window

    def _window_of(self, optimizer: Optimizer, method: str) -> DropInWindow:
        """Returns the window in which the gradients of `optimizer` were made, or raises if none was ever opened.

        After an `update` without a loss since then they are those from before it, unless the optimizer was stepped on
        them: then they are new, and taken to be made with the present scale.
        """
        if self._views["scale"].tensor is None and (self._always_agrees or not self._rule.multiplies):
            # A rank that never has a loss, such as the first stage of a pipeline; or a loop whose losses need no scale.
            self._lazy_init_scale_growth_tracker(parameters_of([optimizer])[0].device)
        self._take_over(method)
        window = self._window
        if window is None or not window.updated:
            return self._open()
        if (known := window.noted.get(id(optimizer))) is not None:
            if known["stage"] is OptState.STEPPED:
                return self._open()
            self._per_optimizer_states[id(optimizer)] = known
        return window

    def scale(self, outputs: Any) -> Any:
        """Returns `outputs` times the scale: a tensor, or an iterable of tensors and further iterables.

        An FP16 tensor is returned in float32, where the product cannot overflow. Does not synchronize with the device,
        but for the outcome of the last step with fused optimizers, which the device has known for long.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            window = self._open(outputs.device)
            product = window.product(outputs)
            # Neither the loss nor a hook on it may leave a transformation.
            if product.requires_grad and not (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(product)):
                if not self._first_loss.seen:
                    self._first_loss.note(outputs, self._rule.policy, "GradScaler")
                product.register_hook(partial(self._on_backward, window.scale, outputs.detach()))
            return product
        if not isinstance(outputs, Iterable) or isinstance(outputs, str):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _on_backward(self, made_with: Tensor, loss: Tensor, grad: Tensor) -> Tensor | None:
        """Notes a loss whose backward pass begins, and returns its gradient for the scale it will be divided by."""
        # Known only now: its loss may have been scaled long before, and the scale have changed since.
        window = self._begin_backward(grad.device)
        window.note_loss(loss)
        return None if window.scale is made_with else window.rescaled(grad, made_with)

    def _begin_backward(self, device: torch.device) -> DropInWindow:
        """Returns the window of a backward pass that begins: parameters that optimizers share may be divided again."""
        window = self._open(device)
        window.passes += 1
        for optimizer in window.divided:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.UNSCALED and "noted" in state and not refusals.with_gradients(optimizer):
                state["noted"].groups = 0  # unscaled, and cleared without a step
        window.divided.clear()
        return window

    @_disable_dynamo
    def backward(self, loss: Tensor, retries: int = 0, **kwargs: Any) -> None:
        """Scales `loss` and runs its backward pass: `scale(loss).backward()`, which can be run again if it overflows.

        An addition to torch's methods, with the meaning that it has in `gradscale.torch.LossScaler`. With `retries`, an
        overflow lowers the scale and runs the backward pass, and only that, again: the batch is not lost. `update` goes
        on from the lowered scale. That costs a host read per attempt, a walk through the graph, and activations that
        are held until the pass has ended. There is no retry after another backward pass since the last `update`, while
        parameters hold gradients, for a loss that is not finite, under `Static`, or at the lowest scale.

        Args:
            loss: a scalar loss, not scaled.
            retries: how often the backward pass may be run again.
            **kwargs: passed on to `Tensor.backward`.

        Raises:
            RuntimeError: `retries` is given, and the backward pass cannot be run again: `torch.distributed` is
                initialized, an optimizer was unscaled or stepped since the last `update`, or the graph has reentrant
                checkpoints.
        """
        check_backward(retries, kwargs)
        if not (self._enabled and retries):
            self.scale(loss).backward(**kwargs)
            return
        refusals.refuse_retries(loss, self._per_optimizer_states, self._rounds.group)
        self._first_loss.note(loss, self._rule.policy, "GradScaler")
        window = self._begin_backward(loss.device)
        owned = parameters_of(self._memory.measured)
        backward_with_retries(loss, window, self._rule, retries, Tensor.tolist, (), owned, kwargs)  # type: ignore[arg-type]

    def _checked(
        self, optimizer: Optimizer, window: DropInWindow, *, edited: bool = False, **asked: Any
    ) -> tuple[StepPlan, Noted, Gate]:
        """Plans, measures, agrees and decides for the gradients of one optimizer, and notes what was seen for `update`.

        Finite gradients are applied whatever the loss was, as in torch. Those that are divided already, and perhaps
        `edited`, are measured once more only for a norm to clip by. The rest is asked for in the plan.
        """
        state = self._per_optimizer_states[id(optimizer)]
        gradients = collect([optimizer], coalesce=asked.get("clip_norm") is not None)
        scale, divides = window.scale, self._rule.multiplies and not edited
        if divides:
            if window.divided:
                refusals.refuse_divided(optimizer, window.divided)
            by_scaler = asked.get("divide", True) and not (
                asked.get("fold", True) and apply.handled_by(optimizer) == "attributes"
            )
            if by_scaler and not self._unscales_half and any(grad.dtype is torch.float16 for grad in gradients.values):
                raise refusals.half_gradients(optimizer)
        noted, device, own = noted_in(state), scale.device, getattr(optimizer, "grad_scale", None)
        measures = not edited or (noted is not None and asked.get("clip_norm") is not None)
        shares, loss_counts = False, True
        if measures and dist.is_available() and dist.is_initialized():
            shares, loss_counts = self._begin_ranks(optimizer)
        plan = None
        on_host = edited or own is not None or noted is not None
        if (self._rule.capturable and not edited) or not (on_host or host.in_host_memory(device)):
            plan = plan_on_device(self._rule, gradients, window, loss_gates=False, **asked)
        if plan is None:
            divisor = window.divisor if divides else np.float32(1.0)
            scale = scale if divides else one(device)
            plan = plan_step(self._rule, gradients, scale, divisor, window.steps, edited=edited, **asked)
        facts = Facts(Seen(), attempted=False) if noted is None else noted.facts
        if measures:
            measured = plan
            if own is not None and plan.folding:
                # The user's own divisor, which the kernel multiplies in: a gradient must be finite after both.
                both, scale = np.float32(float(plan.divisor) * float(own)), plan.scale * own.reshape(())
                measured = plan._replace(divisor=both, scale=scale, grows=True, half=True, waits=True)
            if plan.kernel is not None:
                facts = seen_on_device(plan, window, losses=loss_counts, rounds=self._rounds if shares else None)
            elif shares:
                facts = self._seen_by_ranks(measured, window)
            else:
                facts = seen_here(measured, window, gates_on_loss=False)
            if noted is None:
                elements = count_elements(gradients.values) if plan.edge is not None else 0.0
                read = {"norm": plan.norm, "amax": plan.finds_amax, "elements": elements}
                noted = Noted(optimizer, facts, loss_counts=loss_counts, **read)
            if not edited:
                window.divided.append(optimizer)
            noted.checks.append(facts)
            if plan.norm and noted.normed is None:
                noted.normed = facts
            if facts.attempted:
                before = state["found_inf_per_device"]
                flag = filled(float(not facts.seen().finite), device) if facts.found_inf is None else facts.found_inf()
                flag = merged_flag([flag, *before.values()], device) if before else flag
                devices = {device, *before, *(value.device for value in gradients.values)}
                noted.flags, noted.version = {each: to_device(flag, each) for each in devices}, None
                state |= {"found_inf_per_device": noted.flags, "noted": noted}
                noted_in(state)
        noted = noted or Noted(optimizer, facts)
        checks, flags, applied = noted.checks, list(state["found_inf_per_device"].values()), None
        if plan.waits or all(each.found is not None for each in checks):
            applied = all(each.seen().finite for each in checks)
        gate, earlier = apply.decide(plan, facts, applied, lambda: merged_flag(flags, device)), noted.result
        shown = plan._replace(norm=noted.normed is not None, finds_amax=noted.amax)
        noted.result = result = StepResult(
            self._rule, shown, window, noted.facts, gate, measured=noted.normed, sizes=facts.sizes
        )
        result.skips = lambda: not all(each.seen().finite for each in checks)
        if earlier is not None and earlier.traces is not None:
            result.sizes, result.traces = earlier.sizes, earlier.traces
        if gate.applied is False and result.sizes is None:
            # Counted now, before the user clips: `clip_grad_norm_` with a norm of NaN makes every element NaN, and
            # every parameter would count as non-finite.
            result.sizes = measure_sizes(gradients.values, device).sizes
            result.traces = Traces(gradients, result.sizes)
        return plan, noted, gate

    def _begin_ranks(self, optimizer: Optimizer) -> tuple[bool, bool]:
        """Returns whether ranks decide together on the gradients of an optimizer, and whether all losses are known."""
        # By the parameters: a rank may have none of the gradients.
        sharded = any(hasattr(kind, "to_local") for kind in set(map(type, parameters_of([optimizer]))))
        shares = self._rounds.ranks > 1 and (self._always_agrees or sharded)
        if shares:
            self._rounds.begin()
        self._rounds.check_shards([optimizer])
        return shares, shares or self._rounds.ranks == 1

    def _seen_by_ranks(self, plan: StepPlan, window: DropInWindow) -> Facts:
        """Returns what all ranks have seen of the gradients of one optimizer."""
        measurement = measure(plan, None if plan.edge is None else self._rounds.weights(plan.gradients))
        seen = send_round(self._rounds, plan, window, measurement).seen(plan.scale)
        # Also on a rank without gradients, which would count as one that was not checked.
        return agreed_by(seen, measurement.sizes, True, plan, gates_on_loss=False)

    @_disable_dynamo
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, once, and notes whether they were finite and still are.

        One read and one write of the gradients. While the scale is below 1, one read more, and it synchronizes with the
        device; with `capturable` always one read more, and it does not.
        """
        if self._enabled:
            window = self._window_of(optimizer, "unscale_")
            self._unscale(optimizer, window, allow_fp16=self._unscales_half)

    @_disable_dynamo
    def unscale_and_clip_(self, optimizer: Optimizer, clip_norm: float | None) -> Tensor:
        """Divides the optimizer's gradients by the scale, clips them, and returns their norm before that, unscaled.

        An addition to torch's methods, for gradients that are looked at before the step: `unscale_` and
        `clip_grad_norm_` by one factor, in two reads and one write. The norm is inf if a gradient is not finite, and
        then none is changed. Synchronizes only while the scale is below 1. If nobody looks at the gradients,
        `step(optimizer, clip_norm=...)` takes a pass less with a fused optimizer.

        Args:
            optimizer: the optimizer.
            clip_norm: bound on the norm of its gradients together, unscaled; None for the norm alone.
        """
        check_clip("clip_norm", clip_norm)
        clip = math.inf if clip_norm is None else clip_norm
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(parameters_of([optimizer]), clip)
        window = self._window_of(optimizer, "unscale_")
        norm = self._unscale(optimizer, window, allow_fp16=self._unscales_half, clip_norm=clip).grad_norm
        return filled(0.0, window.scale.device) if norm is None else norm

    def _unscale(
        self, optimizer: Optimizer, window: DropInWindow, *, allow_fp16: bool, clip_norm: float | None = None
    ) -> StepResult:
        """Divides the gradients by the scale that made them, by the method of a subclass or library if there is one."""
        state, otherwise = self._per_optimizer_states[id(optimizer)], self._unscales_otherwise
        if state["stage"] is not OptState.READY:
            raise refusals.second_unscale(state["stage"])
        asked: dict[str, Any] = {"divide": False} if otherwise else {"clip_norm": clip_norm}
        plan, noted, gate = self._checked(optimizer, window, fold=False, **asked)
        if otherwise:  # which may reduce the flags over ranks, too
            inverse, zero = window.scale.reciprocal(), torch.zeros_like(window.scale)
            found, own = self._unscale_grads_(optimizer, inverse, zero, allow_fp16), state["found_inf_per_device"]
            merged = {device: merged_flag([flag, *own.values()], device) for device, flag in found.items()}
            state["found_inf_per_device"] = own | merged
            if clip_norm is not None:
                plan, noted, gate = self._checked(optimizer, window, edited=True, fold=False, clip_norm=clip_norm)
        if clip_norm is not None:
            apply.edit(plan, gate)
        elif not (otherwise or plan.divides or plan.keeps):
            apply.multiply(plan.gradients.values, plan.scale.reciprocal())
        state["stage"], noted.groups = OptState.UNSCALED, len(optimizer.param_groups)
        return noted.result

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the flags of an optimizer, for the caller to reduce over ranks."""
        # Whatever becomes of them counts: torch does not count what a collective writes.
        if (noted := self._per_optimizer_states[id(optimizer)].get("noted")) is not None:
            noted.version = WRITTEN
        return super()._found_inf_per_device(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = collect([optimizer], coalesce=False).values
        if not allow_fp16 and self._rule.multiplies and any(grad.dtype is torch.float16 for grad in gradients):
            raise refusals.half_gradients(optimizer)
        return multiply_and_check(gradients, inv_scale, found_inf)

    @property
    def _unscales_otherwise(self) -> bool:
        """Whether a subclass or a library has replaced the way to unscale: its version must be called at every step."""
        # It may reduce the flag over ranks, or be for another device.
        return getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        window = self._window_of(optimizer, "_check_inf_per_device")
        if self._unscales_otherwise:
            return super()._check_inf_per_device(optimizer)
        self._checked(optimizer, window, divide=False)
        return self._found_inf_per_device(optimizer)

    @_disable_dynamo
    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns what `optimizer.step(*args, **kwargs)` returns with unscaled gradients; None if the step is skipped.

        Unscales the gradients first if `unscale_` was not called. Synchronizes with the device unless the optimizer is
        fused and the scale at least 1. `last` is the result.

        Args:
            optimizer: the optimizer.
            args: for its `step`.
            clip_norm: bound on the norm of its gradients together, unscaled, as for `clip_grad_norm_`. One read of the
                gradients: the kernel of a fused optimizer unscales and clips them, and for others they are multiplied
                by one factor. `last.grad_norm` is the norm before. Clips gradients that `unscale_` has divided, too.
            clip_value: bound on the magnitude of every element, unscaled. A pass of its own.
            kwargs: for its `step`; so are the two bounds if that has arguments of these names.
        """
        clips: dict[str, Any] = {}
        for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if bound is not None:  # the optimizer's own, as in torch, if it has one of that name
                (kwargs if apply.has_argument(type(optimizer), name) else clips)[name] = bound
        if clips != self._clips:
            for name, bound in clips.items():
                check_clip(name, bound)
            self._clips = clips
        if (args or kwargs) and (self._enabled or clips):
            refusals.refuse_arguments(optimizer, kwargs, *args)
        if not self._enabled:
            if "clip_norm" in clips:
                torch.nn.utils.clip_grad_norm_(parameters_of([optimizer]), clips["clip_norm"])
            if "clip_value" in clips:
                torch.nn.utils.clip_grad_value_(parameters_of([optimizer]), clips["clip_value"])
            return optimizer.step(*args, **kwargs)
        window, state = self._window_of(optimizer, "step"), self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        groups = state["noted"].groups if "noted" in state else None
        if groups is not None and groups != len(optimizer.param_groups):
            refusals.refuse_scaled(optimizer, groups)
        # Not an error: torch's scaler runs it.
        if isinstance(optimizer, torch.optim.SGD) and not self._warned_of_fused_sgd:
            if (fault := fault_of_fused_sgd(optimizer)) is not None:
                self._warned_of_fused_sgd = True
                warnings.warn(fault, stacklevel=callers_level())
        if optimizer not in self._memory.measured:
            self._memory.begin([optimizer], window.scale.device)
        handled = apply.handled_by(optimizer)
        if handled == "argument":
            if clips:
                raise refusals.clip_of(optimizer)
            self.last = None
            warnings.warn(refusals.PASSES_ITSELF, FutureWarning, stacklevel=callers_level())
            returned = optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
            return returned
        if state["stage"] is OptState.READY and self._unscales_otherwise:
            self._unscale(optimizer, window, allow_fp16=self._unscales_half or handled == "attributes")
        divided = state["stage"] is OptState.UNSCALED
        plan, noted, gate = self._checked(optimizer, window, edited=divided, **clips)
        if not noted.facts.attempted and (plan.gradients.grads or not plan.folding):
            state["stage"] = OptState.UNSCALED  # as in torch, whose step has unscaled before it raises
            raise refusals.unchecked_gradients(optimizer)
        if plan.folding and gate.applied is False:  # called as by torch's scaler, whose kernel then makes its state
            gate = Gate(None, filled(1.0, plan.scale.device), None, None if plan.keeps else plan.scale)
        if plan.edits:
            apply.edit(plan, gate)
        # Divided from here on, if they are: a step that is repeated because the optimizer raises must not do it again.
        if plan.divides or (plan.edits and gate.factor is not None):
            state["stage"], noted.groups = OptState.UNSCALED, len(optimizer.param_groups)
        returned = apply.apply(plan, gate, *args, **kwargs)
        if noted.result.known is None:  # counted as the step leaves them, if somebody asks
            noted.result.sizes = None if divided else noted.result.sizes
            noted.result.traces = Traces(plan.gradients)
        # Last: if the optimizer raises, the step may be repeated.
        self.last, state["stage"] = noted.result, OptState.STEPPED
        return returned

    @_disable_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of all optimizers, or sets it to `new_scale`.

        Another `update` merges with the one before it if neither `scale` nor a backward pass was called between them,
        as in a loop that calls `step` and `update` for each optimizer: the scale backs off or grows once.
        Does not synchronize with the device, except with a `new_scale`, and where it follows another `update` for the
        same gradients.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`. The scale has been updated then.
        """
        if not self._enabled:
            return
        self._take_over("update")
        before = None if new_scale is None else self._rule.state
        number = None if new_scale is None else settings.number_of(new_scale, self._device, self._rule.policy)
        checked = any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())
        if number is None and not checked:
            raise AssertionError("No inf checks were recorded prior to update.")
        # Without a window, as after a load, no gradients are known that would belong to the scale from before.
        had_gradients = checked or self._window is not None
        window = self._window or self._open()
        window.noted |= self._per_optimizer_states
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        window.divided.clear()
        if checked and window.updated and self._rule.capturable:
            raise refusals.not_capturable()
        if checked and window.updated:  # from the start of the window: a second update for its gradients decides anew
            self._rule.go_back(window.start, window.ahead)
        window.updated = had_gradients
        results = self._close(window) if checked else []
        if number is not None and before is not None:
            counts = {name: getattr(self._rule.state, name) for name in ("applied", "skipped", "consecutive_skips")}
            self._set_state(replace(before, scale=np.float32(number), **counts))
            for result in results:
                result.after = self._rule.state
            # Another update for the same gradients goes on from here.
            window.noted = {
                key: {"stage": state["stage"], "found_inf_per_device": {}} for key, state in window.noted.items()
            }

    def _close(self, window: DropInWindow) -> list[StepResult]:
        """Follows the facts of all optimizers of a window, remembers their step, and returns their results."""
        noted = [each for state in window.noted.values() if (each := noted_in(state)) is not None]
        results = [each.result for each in noted if each.result is not None]  # none of what other code has checked
        skipped = [result for result in results if result.known is False]  # where the host knows
        shown, has_amax = (skipped or results or [None])[-1], self._rule.reads.amax
        checks = [check for each in noted for check in each.checks]
        once = window.ahead is not None and len(checks) == len(noted)
        facts: Facts | None = merged_on_device(checks, window) if once else None
        if facts is None and self._rule.capturable:
            raise refusals.not_capturable()
        if facts is None:
            facts = Merged(noted=noted, ratio=window.start.amax_ratio)
        if all(check.found is not None for check in checks):
            facts.seen()

        def note(state: ScaleState) -> None:
            seen, stuck = facts.seen(), False
            if not seen.finite:
                floor = max(STUCK_AT, torch_rule.bounds_of(self._rule.policy)[0])
                stuck = state.stuck or (window.divisor if facts.after is None else facts.after()[1].made_with) <= floor
            normed = [each.normed for each in noted if each.normed is not None]
            of_all = facts
            if normed != [each.facts for each in noted if each.norm]:  # those of edited gradients
                of_all = Facts(replace(seen, norm=np.float32(math.hypot(*(each.seen().norm for each in normed)))))
            if shown is not None:
                known = state if state.stuck == stuck else replace(state, stuck=np.bool_(stuck))
                self._memory.note(shown, of_all, len(normed) == len(noted), has_amax, known)
            for result in results:
                result.after = state

        # Their ratio is new where both were read of all gradients.
        measured = all(each.amax and each.norm for each in noted)
        self._rule.follow(facts, note, estimates_amax=has_amax and measured)
        # Last: it may raise, and the update is complete by then.
        if shown is not None:
            optimizers = [each.optimizer for each in noted if each.optimizer is not None]
            self._memory.keep(shown, optimizers, sum(result.gradient_count for result in results))
        return results

    def _discard(self) -> None:
        """Forgets what was noted since the last `update`: that step is never made, as after an error."""
        if self._enabled:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            self._window = None

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate and headroom, as `LossScaler.metrics`. Never synchronizes.

        A step is an `update`. Counts start at 0 when a state of torch's is loaded, which has none. `grad_norm` is NaN
        without `clip_norm`, and `headroom_bits` unless the policy reads the largest gradient.
        """
        return self._memory.metrics(self._rule.latest, check=self._rule.capturable)

    def note(self, **numbers: float | Tensor) -> None:
        """Notes numbers of yours for the record of the step that the next `update` ends, as `LossScaler.note`."""
        self._memory.note_numbers(self._rule.steps, numbers)

    def summary(self) -> str:
        """Returns scale and skips as a short text for a progress bar, as `LossScaler.summary`."""
        return summary_of(self._rule.latest)

    def health(self) -> Health:
        """Returns how the run is doing, as `LossScaler.health`. Synchronizes with the device.

        Whether gradients underflow is known only with a policy that reads the largest one, and BF16 is not recognized.
        """
        state = self._rule.state
        return self._memory.health(state, scaling=self.is_enabled(), in_bf16=False, multiplies=self._rule.multiplies)

    def get_scale(self) -> float:
        """Returns the scale; 1 if the scaler is disabled. Synchronizes where the outcome of a step is not known yet."""
        if not self._enabled:
            return 1.0
        return float(self._init_scale) if self._views["scale"].tensor is None else float(self._state().scale)

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale is multiplied when it grows."""
        self._change("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale is multiplied when it backs off."""
        self._change("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the clean steps in a row before the scale grows. Earlier steps count."""
        self._change("growth_interval", new_interval)

    def _change(self, name: str, value: Any) -> None:
        """Sets one number of the rule, or raises if it is invalid or the policy has no such number."""
        if self._enabled:
            self._rule.catch_up()
            self._rule.replace(torch_rule.changed(self._rule.policy, name, value))
        setattr(self, f"_{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and one that torch ignores: the text of a policy or of bounds, or None.

        Synchronizes with the device.
        """
        numbers = super().state_dict()
        if self._enabled:
            self._state()
            numbers |= settings.write_extra(self._rule)
        return numbers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state of this class or of torch's, before the first `scale` or after.

        The saved policy replaces the present one. Nothing is loaded where only one of the two is `CheckOnly`: the run
        goes on in another format. The log says either.
        """
        if self._enabled and state_dict:
            # All of it is read and checked before anything is set.
            numbers, found = settings.read_scaler(state_dict, self._rule.policy)
            present, loaded = (None if isinstance(p, TorchRule) else p for p in (self._rule.policy, found.policy))
            note_loaded_policy(present, loaded)
            if not replaces_policy(present, loaded):
                return
            state_dict = numbers
            self._rule.load(*found)
            self._memory.forget()
            self.last = self._window = None
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Results and windows refer to tensors of the original. torch's `__getstate__` raises unless its states are
        # empty: they are new ones here, so that a shallow copy does not share them.
        contents = super().__getstate__()
        copies = {name: copy(contents[name]) for name in ("_rule", "_memory")}
        fresh = {"last": None, "_window": None, "_views": {name: View() for name in VIEWS}}
        return contents | copies | fresh | {"_per_optimizer_states": defaultdict(_refresh_per_optimizer_state)}


_UNSCALE_GRADS = GradScaler._unscale_grads_
