"""`GradScaler`: a drop-in for torch's own, with its faults fixed and a result for every step."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from gradscale.engine.health import Health
from gradscale.engine.other_arguments import explains_arguments
from gradscale.engine.other_names import OtherNames
from gradscale.engine.saved_text import replaces_policy
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.engine.texts import policy_text
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import multiplies
from gradscale.torch.accumulation.retry import check_backward
from gradscale.torch.bf16 import FirstLoss
from gradscale.torch.drop_in import checked, refusals, retry, saved, settings, stepped, unscale, ways
from gradscale.torch.drop_in.clip import Clip, clip_norm_of_unscaled, step_unscaled
from gradscale.torch.drop_in.close import close_steps, discard_steps
from gradscale.torch.drop_in.ranks import Ranks
from gradscale.torch.drop_in.retry import Leaves
from gradscale.torch.drop_in.same_gradients import Updated, divisor_of
from gradscale.torch.drop_in.scale_bound import ScaleBound
from gradscale.torch.drop_in.scaled import rescaled, scaled
from gradscale.torch.drop_in.steps import Steps
from gradscale.torch.fused_sgd import fault_of_fused_sgd
from gradscale.torch.ranks.log import note_loaded_policy
from gradscale.torch.step import apply
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.measure import multiply_and_check
from gradscale.torch.step.result import StepResult

Optimizer = torch.optim.Optimizer

NO_CLIP = Clip()

TORCHS_RULE = Dynamic()
"""The policy that torch's kernel runs, with the defaults of its settings."""


@_disable_dynamo
def _uncompiled(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a method returns, which runs as outside of a compiled function: there it is a graph break."""
    # When it is traced, `step` finds no gradients. Not as a decorator of the methods: each call would pay for the
    # switch, which takes longer than much that they do.
    return method(*args, **kwargs)


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
    ) -> None:
        settings.check_device(device)
        factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
        numbers = {"init_scale": init_scale, **factors}
        extra = {"min_scale": min_scale, "max_scale": max_scale, "hysteresis": hysteresis}
        if policy is not None:
            policy = as_policy(policy)
            settings.refuse_second_rule(numbers | extra)
        # Without the numbers: torch's own checks, which differ between its versions, are among those below.
        super().__init__(device, enabled=enabled and (policy is None or bool(policy.needs)))
        self.last: StepResult | None = None
        self._bounds = settings.Bounds()
        self._rule: Rule | None = None
        self._bound = ScaleBound()
        self._divided: list[Optimizer] = []
        self._leaves = Leaves()
        self._updated: Updated | None = None
        self._ranks = Ranks(group)
        self._warned_of_fused_sgd = False
        self._first_loss = FirstLoss()
        if self._enabled:
            given = settings.from_numbers(numbers, **extra) if policy is None else settings.of_policy(policy)
            for name in numbers:
                setattr(self, f"_{name}", getattr(given, name))
            self._bounds = given.bounds
            self._rule = None if given.policy is None else Rule(given.policy)
        self._steps = Steps(max_consecutive_skips, on_stuck, self.get_scale())

    def __repr__(self) -> str:
        """Returns scale, counts and the status of the last step as text. Never synchronizes."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        about = settings.text_of(self) if self._rule is None else [policy_text(self._rule.policy)]
        return self._steps.text(
            type(self).__name__, about, self._init_scale if self._scale is None else self._scale, self.last
        )

    def scale(self, outputs: Any) -> Any:
        """Returns `outputs` times the scale: a tensor, or an iterable of tensors and further iterables.

        An FP16 tensor is returned in float32, where the product cannot overflow. Does not synchronize with the device.
        """
        if not self._enabled:
            return outputs
        self._updated = None
        self._leaves.complete = False
        return scaled(outputs, self._scale_for, self._followed, multiplies=self._multiplies)

    @property
    def _policy(self) -> Policy:
        return TORCHS_RULE if self._rule is None else self._rule.policy

    @property
    def _multiplies(self) -> bool:
        """Whether losses and gradients are multiplied at all: not by a scale that is always 1."""
        return self._rule is None or multiplies(self._rule.policy)

    def backward(self, loss: Tensor, retries: int = 0, **kwargs: Any) -> None:
        """Scales `loss` and runs its backward pass: `scale(loss).backward()`, which can be run again if it overflows.

        An addition to torch's methods, with the meaning that it has in `gradscale.torch.LossScaler`. With `retries`, an
        overflow lowers the scale and runs the backward pass, and only that, again: the batch is not lost, and
        gradients of earlier micro-batches are kept and multiplied to the new scale. `update` goes on from the lowered
        scale. That costs a host read per attempt, a walk through the graph, activations that are held until the pass
        has ended, and a second set of gradients if there are earlier ones. There is no retry for a loss that is not
        finite, under `Static`, or at the lowest scale.

        Args:
            loss: a scalar loss, not scaled.
            retries: how often the backward pass may be run again.
            **kwargs: passed on to `Tensor.backward`.

        Raises:
            RuntimeError: `retries` is given, and the backward pass cannot be run again: `torch.distributed` is
                initialized, an optimizer was unscaled or stepped since the last `update`, a loss was scaled by `scale`
                since then, or the graph has reentrant checkpoints.
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(GradScaler.backward, self, loss, retries, **kwargs)
        check_backward(retries, kwargs)
        if not self._enabled:
            loss.backward(**kwargs)
        elif retries:
            self._retry(loss, retries, kwargs)
        else:
            self._leaves.complete = False
            product = scaled(loss, self._scale_for, self._noted, multiplies=self._multiplies)
            self._begin_backward()
            product.backward(**kwargs)

    def _retry(self, loss: Tensor, retries: int, kwargs: dict[str, Any]) -> None:
        """Runs the backward pass of `loss`, again at a lower scale while it overflows; raises if it cannot be."""
        if reason := retry.obstacle(loss, self._leaves, self._per_optimizer_states, self._ranks.group):
            raise RuntimeError(f"`retries` cannot run this backward pass again: {reason}")
        self._begin_backward()
        self._note_types(loss)
        self._steps.retries += retry.retried(self, loss, self._leaves.add(loss), retries, kwargs)
        self._steps.losses.add(loss)

    def _scale_for(self, device: torch.device) -> Tensor:
        """Returns the scale, which the first loss puts on its `device`."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return self._check_scale_growth_tracker("scale")[0]

    def _followed(self, product: Tensor, loss: Tensor, made_with: Tensor) -> Tensor:
        """Returns `product`, with its loss noted and a hook on its backward pass."""
        if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(product):
            # Neither the loss nor a hook on it may leave the transformation.
            self._divided.clear()
        elif self._noted(product, loss).requires_grad:
            version = self._scale._version  # type: ignore[union-attr]
            product.register_hook(partial(self._on_backward, made_with, version))
        return product

    def _noted(self, product: Tensor, loss: Tensor, *_: Tensor) -> Tensor:
        """Returns `product`, with its loss noted if it has a backward pass."""
        if product.requires_grad:
            self._steps.losses.add(loss)
            self._note_types(loss)
        return product

    def _note_types(self, loss: Tensor) -> None:
        if not self._first_loss.seen:
            self._first_loss.note(loss, self._policy, "GradScaler")

    def _begin_backward(self) -> None:
        """Notes that there will be new gradients: parameters that optimizers share may be divided once more."""
        if self._divided:
            for state in refusals.replaced(self._divided, self._per_optimizer_states):
                state["replaced"] = True
            self._divided.clear()
        self._updated = None

    def _on_backward(self, made_with: Tensor, version: int, grad: Tensor) -> Tensor | None:
        # Known only when the backward pass begins: its loss may have been scaled long before.
        self._begin_backward()
        scale = self._scale
        return None if scale is None or scale._version == version else rescaled(grad, made_with, scale)

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
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(GradScaler.unscale_, self, optimizer)
        if self._enabled:
            checked.divide(self, optimizer, self._to_unscale(optimizer), allow_fp16=self._unscales_half)

    def unscale_and_clip_(self, optimizer: Optimizer, clip_norm: float | None) -> Tensor:
        """Divides the optimizer's gradients by the scale, clips them, and returns their norm before that, unscaled.

        An addition to torch's methods, for gradients that are looked at before the step: `unscale_` and
        `clip_grad_norm_` by one factor, in two reads and one write. The norm is inf if a gradient is not finite, and
        then none is changed. Does not synchronize. If nobody looks at the gradients,
        `step(optimizer, clip_norm=...)` takes a pass less with a fused optimizer.

        Args:
            optimizer: the optimizer.
            clip_norm: bound on the norm of its gradients together, unscaled; None for the norm alone.
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(GradScaler.unscale_and_clip_, self, optimizer, clip_norm)
        clip = Clip(math.inf if clip_norm is None else clip_norm)
        if not self._enabled:
            return clip_norm_of_unscaled(optimizer, clip, self._ranks)
        return ways.unscaled(self, optimizer, self._to_unscale(optimizer), clip)

    def _to_unscale(self, optimizer: Optimizer) -> Tensor:
        """Returns the scale that made the gradients of `optimizer`, or raises if they have been divided by it."""
        scale = divisor_of(self, optimizer, "unscale_")
        refusals.refuse_second_unscale(self._per_optimizer_states[id(optimizer)]["stage"])
        return scale

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._divide(optimizer, unscale.gradients_of(optimizer), inv_scale, found_inf, allow_fp16)

    def _divide(
        self,
        optimizer: Optimizer,
        gradients: list[Tensor],
        inv_scale: Tensor,
        found_inf: Tensor | None,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Multiplies the gradients of `optimizer`, and returns per device whether one was not finite."""
        if not self._multiplies:
            return unscale.check_only(gradients, inv_scale)
        if not allow_fp16:
            refusals.refuse_half(optimizer, gradients)
        return multiply_and_check(gradients, inv_scale, found_inf)

    @property
    def _unscales_otherwise(self) -> bool:
        """Whether a subclass or a library has replaced the way to unscale: its version must be called at every step."""
        # It may reduce the flag over ranks, or be for another device.
        return getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        scale = divisor_of(self, optimizer, "_check_inf_per_device")
        if self._unscales_otherwise:
            return super()._check_inf_per_device(optimizer)
        return checked.check(self, optimizer, scale)

    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns what `optimizer.step(*args, **kwargs)` returns with unscaled gradients; None if the step is skipped.

        Unscales the gradients first if `unscale_` was not called. Synchronizes with the device, once, unless the
        optimizer is fused. `last` is the result.

        Args:
            optimizer: the optimizer.
            args: for its `step`.
            clip_norm: bound on the norm of its gradients together, unscaled, as for `clip_grad_norm_`. One read of the
                gradients: the kernel of a fused optimizer unscales and clips them, and for others they are multiplied
                by one factor. `last.grad_norm` is the norm before. Clips gradients that `unscale_` has divided, too.
            clip_value: bound on the magnitude of every element, unscaled. A pass of its own.
            kwargs: for its `step`; so are the two bounds if that has arguments of these names.
        """
        if torch.compiler.is_dynamo_compiling():
            bounds = {"clip_norm": clip_norm, "clip_value": clip_value}
            return _uncompiled(GradScaler.step, self, optimizer, *args, **bounds, **kwargs)
        clip = NO_CLIP
        if clip_norm is not None or clip_value is not None:
            clip = Clip.for_step(optimizer, {"clip_norm": clip_norm, "clip_value": clip_value}, kwargs)
        if not self._enabled:
            return step_unscaled(optimizer, clip, self._ranks, *args, **kwargs)
        if args or kwargs:
            refusals.refuse_closure(*args, **kwargs)
            refusals.refuse_clip(optimizer, kwargs)
        scale = divisor_of(self, optimizer, "step")
        state = self._per_optimizer_states[id(optimizer)]
        refusals.refuse_second_step(state["stage"])
        if state["stage"] is OptState.UNSCALED and state["found_inf_per_device"]:
            refusals.refuse_replaced(optimizer, state)
            refusals.refuse_added_groups(optimizer, state.get("groups"))
        if isinstance(optimizer, torch.optim.SGD):
            self._warn_of_fused_sgd(optimizer)
        self._steps.begin(optimizer, scale.device)
        if apply.takes_scaler(optimizer):
            refusals.refuse_clip_by(optimizer, clip.asked)
            self.last = None
            returned = stepped.step_with_scaler(optimizer, self, *args, **kwargs)
        elif clip.asked:
            returned = ways.clipped(self, optimizer, scale, clip, *args, **kwargs)
        elif apply.folds(optimizer):
            returned = ways.folded(self, optimizer, scale, *args, **kwargs)
        else:
            returned = ways.gated(self, optimizer, scale, *args, **kwargs)
        # Last: if the optimizer raises, the step may be repeated.
        state["stage"] = OptState.STEPPED
        return returned

    def _warn_of_fused_sgd(self, optimizer: Optimizer) -> None:
        # Not an error: torch's scaler runs it.
        if not self._warned_of_fused_sgd and (fault := fault_of_fused_sgd(optimizer)) is not None:
            self._warned_of_fused_sgd = True
            warnings.warn(fault, stacklevel=3)

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        scale = divisor_of(self, optimizer, "step")
        step = stepped.step_gated(optimizer, optimizer_state, scale, *args, **kwargs)
        return self._remembered(optimizer, scale, step)

    def _remembered(self, optimizer: Optimizer, scale: Tensor, step: stepped.Stepped) -> Any:
        """Returns what the optimizer's `step` returned, and sets `last`."""
        self.last = self._steps.add(optimizer, self._per_optimizer_states[id(optimizer)], scale, step)
        return step.returned

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of all optimizers, or sets it to `new_scale`.

        Another `update` merges with the one before it if neither `scale` nor a backward pass was called between them,
        as in a loop that calls `step` and `update` for each optimizer: the scale backs off or grows once.
        Does not synchronize with the device, except to check a `new_scale` that is a tensor there.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`. The scale has been updated then.
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(GradScaler.update, self, new_scale)
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        number = None if new_scale is None else settings.checked_scale(new_scale, self._device, self._bounds)
        close_steps(self, scale, tracker, number)

    def _discard(self) -> None:
        """Forgets what was noted since the last `update`: that step is never made, as after an error."""
        if self._enabled:
            self._updated = Updated()
            discard_steps(self)

    def metrics(self) -> dict[str, float]:
        """Returns scale, counts, skip rate and headroom, as `LossScaler.metrics`. Never synchronizes.

        A step is an `update`. Counts start at 0 when a state of torch's is loaded, which has none. `grad_norm` is NaN
        without `clip_norm`, and `headroom_bits` unless the policy reads the largest gradient.
        """
        return self._steps.metrics()

    def health(self) -> Health:
        """Returns how the run is doing, as `LossScaler.health`. Synchronizes with the device.

        Whether gradients underflow is known only with a policy that reads the largest one, and BF16 is not recognized.
        """
        return self._steps.health(self.is_enabled(), self._multiplies)

    def _numbers(self) -> tuple[float, float, int]:
        """Returns the numbers of torch's rule that its kernel takes."""
        return self._growth_factor, self._backoff_factor, int(self._growth_interval)

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
            settings.check_number_of_rule(name, value)
            if self._rule is not None:
                self._rule.policy = settings.changed(self._rule.policy, name, value)
        setattr(self, f"_{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and one that torch ignores: the text of a policy or of bounds, or None.

        Synchronizes with the device.
        """
        numbers = super().state_dict()
        if self._enabled:
            numbers |= saved.write_extra(self._rule, self._bounds, numbers["scale"], numbers["_growth_tracker"])
        return numbers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state of this class or of torch's, before the first `scale` or after.

        The saved policy replaces the present one. Nothing is loaded where only one of the two is `CheckOnly`: the run
        goes on in another format. The log says either.
        """
        if self._enabled and state_dict:
            # All of it is read and checked before anything is set.
            present = None if self._rule is None else self._rule.policy
            found = saved.read_scaler(state_dict, present, self._bounds)
            note_loaded_policy(present, found.policy)
            if not replaces_policy(present, found.policy):
                return
            self._updated = Updated()
            state_dict, self._bounds, self._rule = found.numbers, found.bounds, found.rule
            self._steps.restart(found.counters())
        super().load_state_dict(state_dict)
        if self._enabled and self._scale is not None:
            self._settle()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | saved.contents_of_copy(self._rule, self._steps)


_UNSCALE_GRADS = GradScaler._unscale_grads_
