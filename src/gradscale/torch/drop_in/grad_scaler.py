"""`GradScaler`: a drop-in for torch's own, with its faults fixed and a result for every step."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradscale.engine.measurement import Measurement
from gradscale.engine.other_names import OtherNames
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.engine.texts import policy_text, scaler_text
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import Static
from gradscale.torch.bf16 import note_if_bf16
from gradscale.torch.drop_in.saved import read_scaler, write_extra
from gradscale.torch.drop_in.scale_bound import ScaleBound
from gradscale.torch.drop_in.settings import (
    Bounds,
    changed,
    check_device,
    check_number_of_rule,
    number_from_tensor,
    refuse_second_rule,
    settings_from,
    settings_of,
    settings_text,
)
from gradscale.torch.drop_in.steps import Steps
from gradscale.torch.drop_in.unscale import (
    gradients_and_sharing,
    gradients_of,
    refuse_added_groups,
    refuse_divided,
    refuse_half,
    sizes_of,
    unchecked_gradients,
)
from gradscale.torch.drop_in.update import measure_for, seen_by, update_by_kernel, update_by_policy
from gradscale.torch.fused_sgd import fault_of_fused_sgd
from gradscale.torch.step import apply
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import collect
from gradscale.torch.step.host_copy import host_value, moved, shown
from gradscale.torch.step.measure import any_overflow, check, multiply_and_check
from gradscale.torch.step.result import StepResult, Traces

Optimizer = torch.optim.Optimizer

TORCHS_RULE = Dynamic()
"""The policy that torch's kernel runs, with the defaults of its settings."""


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
        policy: a rule for the scale, or its name, instead of the four numbers above. `NoScaling()` is the same as
            `enabled=False`.
        min_scale: lowest scale; by default 2**-126.
        max_scale: highest scale; by default the largest float32.
        hysteresis: overflows before the scale backs off for the first time.
        max_consecutive_skips: skipped steps in a row, at a scale of at most 1 or with a loss that is not finite, before
            the run is stuck.
        on_stuck: what to do then. `"warn"`, once until a step is applied again, with the likely cause; or `"raise"` a
            `ScaleStuck` in every `update`, call a function with it once, or `"ignore"` it.

    Attributes:
        last: the result of the last `step`; None before the first, when disabled, and for an optimizer that takes the
            scaler as an argument. Its `next_scale` is set by `update`.
    """

    _adapter: ClassVar[str] = "torch drop-in"

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
    ) -> None:
        check_device(device)
        numbers = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        if policy is not None:
            policy = as_policy(policy)
            refuse_second_rule(numbers | {"min_scale": min_scale, "max_scale": max_scale, "hysteresis": hysteresis})
        # Without the numbers: torch's own checks, which differ between its versions, are among those below.
        super().__init__(device, enabled=enabled and (policy is None or bool(policy.needs)))
        self.last: StepResult | None = None
        self._bounds = Bounds()
        self._rule: Rule | None = None
        self._bound = ScaleBound()
        self._divided: list[Optimizer] = []
        self._warned_of_fused_sgd = False
        self._types_known = False
        if self._enabled:
            given = settings_from(numbers, min_scale, max_scale, hysteresis) if policy is None else settings_of(policy)
            for name in numbers:
                setattr(self, f"_{name}", getattr(given, name))
            self._bounds = given.bounds
            self._rule = None if given.policy is None else Rule(given.policy)
        self._steps = Steps(max_consecutive_skips, on_stuck, self.get_scale())

    def __repr__(self) -> str:
        """Returns scale, counts and the status of the last step as text. Never synchronizes."""
        if not self._enabled:
            return "GradScaler(enabled=False)"
        about = settings_text(self) if self._rule is None else [policy_text(self._rule.policy)]
        counts = self._steps.counters
        skipped = shown(counts.skipped)
        state = SimpleNamespace(
            scale=self._init_scale if self._scale is None else self._scale,
            applied=skipped if isinstance(skipped, str) else counts.applied,  # computed on the device otherwise
            skipped=skipped,
        )
        return scaler_text("GradScaler", about, state, self.last, shown)

    def scale(self, outputs: Any) -> Any:
        """Returns `outputs` times the scale: a tensor, or an iterable of tensors and further iterables.

        An FP16 tensor is returned in float32, where the product cannot overflow. Does not synchronize with the device.
        """
        if not self._enabled:
            return outputs
        return self._scaled(outputs)

    def _scaled(self, outputs: Any, copies: dict[torch.device, Tensor] | None = None) -> Any:
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            scale, _ = self._check_scale_growth_tracker("scale")
            # Autograd keeps the scale for the backward pass, and refuses one that `update` has written to. As in torch,
            # several losses get a copy, so that one may be differentiated after an update for another.
            if copies is not None and outputs.device not in copies:
                copies[outputs.device] = moved(scale, outputs.device).clone()
            local = moved(scale, outputs.device) if copies is None else copies[outputs.device]
            wide = outputs.float() if outputs.dtype is torch.float16 else outputs
            return self._followed(wide * local, wide, local)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(partial(self._scaled, copies={} if copies is None else copies), outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _followed(self, scaled: Tensor, loss: Tensor, made_with: Tensor) -> Tensor:
        """Returns `scaled`, with its loss noted and a hook on its backward pass."""
        if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(scaled):
            # Neither the loss nor a hook on it may leave the transformation.
            self._divided.clear()
        elif scaled.requires_grad:
            self._steps.losses.add(loss)
            if not self._types_known:
                self._types_known = True
                note_if_bf16(loss, TORCHS_RULE if self._rule is None else self._rule.policy, "GradScaler")
            version = self._scale._version  # type: ignore[union-attr]
            scaled.register_hook(partial(self._on_backward, made_with, version))
        return scaled

    def _on_backward(self, made_with: Tensor, version: int, grad: Tensor) -> Tensor | None:
        # New gradients: parameters that optimizers share may be divided once more. Known only when the backward pass
        # begins: its loss may have been scaled long before.
        self._divided.clear()
        scale = self._scale
        if scale is None or scale._version == version:
            return None
        # The scale may have changed since, and the gradients will be divided by the present one.
        return grad * (moved(scale, made_with.device) / made_with)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._settle()

    def _settle(self) -> None:
        """Brings the bound and the rule to the device and the value of the scale."""
        scale, _ = self._check_scale_growth_tracker("scale")
        self._bound.set(scale, float(self._init_scale))
        if self._rule is not None:
            self._rule.settle(scale.device)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, once, and notes whether they were finite and still are.

        One read and one write of the gradients; one read more while the scale is below 1. Does not synchronize.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(optimizer, scale, allow_fp16=False)

    def _unscale(self, optimizer: Optimizer, scale: Tensor, *, allow_fp16: bool) -> None:
        refuse_divided(optimizer, self._divided)
        state = self._per_optimizer_states[id(optimizer)]
        if (policy := self._sizing_policy) is not None:
            self._note_sizes(optimizer, measure_for(policy, gradients_of(optimizer), scale, None))
        # torch takes the inverse in float64, which not every device has. In float32 it is correctly rounded too, and
        # exact for powers of two.
        factor, no = scale.reciprocal(), torch.zeros((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, factor, no, allow_fp16)
        if flags and self._bound.may_be_below_one(scale):
            # torch's kernel checks the values before it multiplies them: finite ones may be inf after a division by
            # a scale below 1.
            overflow, _ = check(gradients_of(optimizer), torch.ones_like(scale), grows=True)
            flags = {device: torch.maximum(flag, overflow.to(flag)) for device, flag in flags.items()}
        state["found_inf_per_device"] = flags
        state["stage"] = OptState.UNSCALED
        state["groups"] = len(optimizer.param_groups)
        self._divided.append(optimizer)
        if host_value(any_overflow(flags.values(), scale.device)):
            # Measured now, before the user clips: `clip_grad_norm_` with a norm of NaN makes every element NaN, and
            # every parameter would count as non-finite.
            state["measured"] = sizes_of(gradients_of(optimizer), scale.device)
            state["traces"] = Traces(collect([optimizer]), state["measured"].sizes)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = gradients_of(optimizer)
        if not allow_fp16:
            refuse_half(optimizer, gradients)
        return multiply_and_check(gradients, inv_scale, found_inf)

    def _note_sizes(self, optimizer: Optimizer, measured: Measurement) -> None:
        """Keeps the sizes of the optimizer's scaled gradients for the policy until `update`."""
        elements = sum(grad.numel() for grad in gradients_of(optimizer))
        self._per_optimizer_states[id(optimizer)]["sizes"] = (measured, elements)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Notes and returns, per device, whether the gradients are finite now and would be once divided by the scale.

        Reads the gradients once and changes none. Does not synchronize with the device.
        """
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        gradients, state["sharing"] = gradients_and_sharing(optimizer)
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            # A subclass or a library has replaced it, to reduce the flag over ranks or for another device: its version
            # must be called here too.
            return super()._check_inf_per_device(optimizer)
        own, policy = getattr(optimizer, "grad_scale", None), self._sizing_policy
        divisor = scale if own is None else scale * own
        grows = own is not None or self._bound.may_be_below_one(scale)
        overflow, measured = check(gradients, divisor, grows=grows, amax=policy is not None)
        if policy is not None:
            self._note_sizes(optimizer, measure_for(policy, gradients, scale, measured))
        state["measured"] = measured
        devices = {grad.device for grad in gradients}
        state["found_inf_per_device"] = {device: overflow.to(device, torch.float32) for device in devices}
        return state["found_inf_per_device"]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Returns what `optimizer.step(*args, **kwargs)` returns with unscaled gradients; None if the step is skipped.

        Unscales the gradients first if `unscale_` was not called. Synchronizes with the device, once, unless the
        optimizer is fused. `last` is the result.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.UNSCALED and state["found_inf_per_device"]:
            refuse_added_groups(optimizer, state.get("groups"))
        self._warn_of_fused_sgd(optimizer)
        self._steps.begin(optimizer, scale.device)
        if apply.takes_scaler(optimizer):
            returned = self._step_with_scaler(optimizer, *args, **kwargs)
        elif apply.folds(optimizer):
            returned = self._step_folded(optimizer, scale, *args, **kwargs)
        else:
            returned = self._step_gated(optimizer, scale, *args, **kwargs)
        # Last: if the optimizer raises, the step may be repeated.
        state["stage"] = OptState.STEPPED
        return returned

    def _warn_of_fused_sgd(self, optimizer: Optimizer) -> None:
        # Not an error: torch's scaler runs it.
        if not self._warned_of_fused_sgd and (fault := fault_of_fused_sgd(optimizer)) is not None:
            self._warned_of_fused_sgd = True
            warnings.warn(fault, stacklevel=3)

    def _step_with_scaler(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=3,
        )
        self.last = None
        return optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]

    def _step_folded(self, optimizer: Optimizer, scale: Tensor, *args: Any, **kwargs: Any) -> Any:
        state, divisor = self._per_optimizer_states[id(optimizer)], None
        if state["stage"] is OptState.READY:
            refuse_divided(optimizer, self._divided)
            self._check_inf_per_device(optimizer)
            divisor = self._get_scale_async()
            if state.get("sharing"):
                # The kernel writes the divided gradient back, and would divide it for each parameter that holds it.
                gradients, divisor = gradients_of(optimizer), None
                refuse_half(optimizer, gradients)
                apply.multiply(gradients, scale.reciprocal())
                state["stage"] = OptState.UNSCALED
            self._divided.append(optimizer)
        elif not state["found_inf_per_device"] and gradients_of(optimizer):
            raise unchecked_gradients(optimizer)
        overflow = any_overflow(state["found_inf_per_device"].values(), scale.device)
        returned = apply.step_folded(optimizer, divisor, overflow.float(), *args, **kwargs)
        measured, overflowed = state.get("measured"), host_value(overflow)
        if measured is None and overflowed:
            measured = sizes_of(gradients_of(optimizer), scale.device)
        self._remember(optimizer, scale, overflow, measured, None if overflowed is None else not overflowed)
        return returned

    def _step_gated(self, optimizer: Optimizer, scale: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self._unscale(optimizer, scale, allow_fp16=apply.takes_gate(optimizer))
        if not state["found_inf_per_device"]:
            raise unchecked_gradients(optimizer)
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        scale, _ = self._check_scale_growth_tracker("step")
        overflow = any_overflow(optimizer_state["found_inf_per_device"].values(), scale.device)
        returned, measured, skips = None, None, bool(overflow)
        if skips:
            apply.hold(optimizer)
            measured = optimizer_state.get("measured") or sizes_of(gradients_of(optimizer), scale.device)
        else:
            returned = optimizer.step(*args, **kwargs)
        self._remember(optimizer, scale, overflow, measured, not skips)
        return returned

    def _remember(
        self,
        optimizer: Optimizer,
        scale: Tensor,
        overflow: Tensor,
        measured: Measurement | None,
        applied: bool | None,
    ) -> None:
        """Sets `last`. `applied` is whether the step was applied, if the host knows it."""
        # A copy: `update` writes to the scale in place, and the result must keep that of its step.
        present, state = scale.clone(), self._per_optimizer_states[id(optimizer)]
        seen = seen_by([state["sizes"]], overflow, present) if "sizes" in state else None
        # Finite gradients are applied whatever the loss was, as in torch: where they are known to be, it is not needed.
        applies = host_value(overflow) == 0
        loss_finite = torch.ones_like(overflow) if applies else self._steps.losses.finite(scale.device)
        counted = measured.sizes if measured is not None and applied is False else None
        traceless = applied and measured is None
        traces = None if traceless else state.get("traces") or Traces(collect([optimizer]), counted)
        self.last = StepResult(
            applied=~overflow,
            scale=present,
            next_scale=present,
            loss_finite=loss_finite,
            amax=None if seen is None else seen.amax,
            attempted=bool(state["found_inf_per_device"]),
            sizes=None if measured is None else measured.sizes,
            traces=traces,
            known=applied,
        )
        self._steps.add(optimizer, self.last)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of all optimizers, or sets it to `new_scale`.

        Does not synchronize with the device, except to check a `new_scale` that is a tensor there.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`. The scale has been updated then.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        overflow = any_overflow(flags, scale.device)
        results = self._steps.pending(overflow, scale)
        if new_scale is None:
            if not flags:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._move(scale, tracker, overflow)
        else:
            number = number_from_tensor(new_scale, self._device) if isinstance(new_scale, Tensor) else new_scale
            # Checked before it is written: torch would take 0, inf or NaN, and scale by it from then on.
            number = self._bounds.checked("new_scale", number)
            self._bound.set(scale.fill_(number), number)
        after = scale.clone()
        for result in results:
            result.next_scale = after
        self._divided.clear()
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if not flags:
            self._steps.discard()
            return
        at_floor = False if self._rule is None else self._rule.state.stuck
        # Last: it may raise, and the update is complete by then.
        self._steps.close(results, overflow, after, self._bounds.min_scale, at_floor)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate and headroom, as `LossScaler.metrics`. Never synchronizes.

        A step is an `update`. Counts start at 0 when a state of torch's is loaded, which has none. `grad_norm` is NaN,
        and so is `headroom_bits` unless the policy reads the largest gradient.
        """
        return self._steps.metrics()

    def _move(self, scale: Tensor, tracker: Tensor, overflow: Tensor) -> None:
        # Before the update, which changes the version that distinguishes writes by others.
        self._bound.revalidate(scale)
        if self._rule is None:
            numbers = (self._growth_factor, self._backoff_factor, int(self._growth_interval))
            update_by_kernel(scale, tracker, overflow, *numbers, self._bounds)
        else:
            states = self._per_optimizer_states.values()
            seen = seen_by([state["sizes"] for state in states if "sizes" in state], overflow, scale)
            update_by_policy(self._rule, scale, tracker, seen, self._bounds)
        self._bound.lowered(scale, by=self._lowest_factor)

    @property
    def _lowest_factor(self) -> float:
        """The least that one update may multiply the scale by; 0 where the policy has no such bound."""
        if self._rule is None or isinstance(self._rule.policy, Dynamic):
            return self._backoff_factor
        return 1.0 if isinstance(self._rule.policy, Static) else 0.0

    @property
    def _sizing_policy(self) -> Policy | None:
        """The policy if it needs the sizes of the gradients, else None."""
        if self._rule is None or self._rule.policy.needs <= {"finite", "loss_finite"}:
            return None
        return self._rule.policy

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
            check_number_of_rule(name, value)
            if self._rule is not None:
                self._rule.policy = changed(self._rule.policy, name, value)
        setattr(self, f"_{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and one that torch ignores where a policy, hysteresis or bounds were given.

        Synchronizes with the device.
        """
        saved = super().state_dict()
        if self._enabled:
            saved |= write_extra(self._rule, self._bounds, saved["scale"], saved["_growth_tracker"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state of this class or of torch's, before the first `scale` or after."""
        if self._enabled and state_dict:
            # All of it is read and checked before anything is set.
            saved = read_scaler(state_dict, None if self._rule is None else self._rule.policy, self._bounds)
            state_dict = saved.numbers
            self._bounds, self._rule = saved.bounds, saved.rule
            self._steps.restart(saved.counters())
        super().load_state_dict(state_dict)
        if self._enabled and self._scale is not None:
            self._settle()

    def __getstate__(self) -> dict[str, Any]:
        # Results, bounds and divided optimizers refer to tensors of the original.
        state = super().__getstate__() | {
            "last": None,
            "_bound": ScaleBound(),
            "_divided": [],
            "_steps": copy.copy(self._steps),
        }
        # torch's `__getstate__` raises unless it is empty; a new one, so that a shallow copy does not share it.
        state["_per_optimizer_states"] = defaultdict(_refresh_per_optimizer_state)
        if self._rule is not None:
            present = self._rule.state
            state["_rule"] = Rule(self._rule.policy, type(present).from_dict(present.to_dict()))
        return state


_UNSCALE_GRADS = GradScaler._unscale_grads_
