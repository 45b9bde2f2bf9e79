"""`GradScaler.backward`: the backward pass that is run again at a lower scale when it overflows."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.accumulation.graph import has_hidden_leaves
from gradscale.torch.accumulation.leaves import leaves_of
from gradscale.torch.accumulation.retry import Stash, attempt
from gradscale.torch.drop_in import update
from gradscale.torch.drop_in.same_gradients import States
from gradscale.torch.drop_in.scaled import scaled
from gradscale.torch.local import local
from gradscale.torch.step.host_copy import kept


class Leaves:
    """The tensors whose gradients have the present scale, as far as `backward` has made them.

    Attributes:
        complete: whether these are all of them: no loss was scaled by `scale` since the last `update`.
    """

    __slots__ = ("_found", "complete")

    def __init__(self) -> None:
        self.complete = True
        self._found: dict[int, weakref.ref[Tensor]] = {}

    def __reduce__(self) -> tuple[type["Leaves"], tuple[()]]:
        """A copy starts empty."""
        return Leaves, ()

    def clear(self) -> None:
        """Forgets them: the gradients of the next loss have another scale."""
        self.complete = True
        if self._found:
            self._found = {}

    def add(self, loss: Tensor) -> list[Tensor]:
        """Adds the leaves of a loss, and returns all, each once."""
        self._found |= {id(leaf): weakref.ref(leaf) for leaf in leaves_of(loss)}
        return [leaf for reference in self._found.values() if (leaf := reference()) is not None]


def obstacle(loss: Tensor, leaves: Leaves, states: States, group: Any) -> str | None:
    """Returns why the backward pass of `loss` cannot be run again, and what to do; None if it can.

    Args:
        loss: the loss.
        leaves: those of earlier losses.
        states: what is noted of the optimizers since the last `update`.
        group: the ranks that decide together.
    """
    if dist.is_available() and dist.is_initialized() and group != "alone":
        return (
            "a backward pass under DDP or FSDP sends its gradients to other ranks, once for each forward pass, and a "
            "GradScaler does not know whether the model does so. Use `gradscale.torch.LossScaler(model)`, which does; "
            "or, where this process trains a model by itself, `GradScaler(group='alone')`."
        )
    if any(state["stage"] is not OptState.READY for state in states.values()):
        return (
            "an optimizer was unscaled or stepped since the last `update`, with the scale that a retry would change. "
            "Call `backward` before `unscale_` and `step`, or after `update`."
        )
    if not leaves.complete:
        return (
            "a retry brings all gradients to the new scale, and those of a loss that was scaled otherwise since the "
            "last `update` are not known. Call `backward(loss, retries=...)` for every loss of the step."
        )
    if has_hidden_leaves(loss):
        return (
            "reentrant checkpointing hides which gradients the backward pass makes. Use "
            "`checkpoint(..., use_reentrant=False)`, or `gradscale.torch.LossScaler(model)`."
        )
    return None


@dataclass(slots=True)
class DropInScale:
    """The scale of a `GradScaler`, lowered in place by its rule.

    Attributes:
        scaler: the scaler.
        retries: how often it was lowered.
    """

    scaler: Any
    retries: int = 0

    @property
    def scale(self) -> Tensor:
        """The present scale."""
        return self.scaler._scale

    def product(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the scale. It is not followed: `retried` does that, once for all attempts."""
        return scaled(loss, self.scaler._scale_for, lambda product, *_: product, multiplies=self.scaler._multiplies)

    def lowered(self) -> tuple[Any, Tensor]:
        """Returns the state after one backoff, whatever the hysteresis says, and its scale.

        Of torch's own rule, the state is the tracker.
        """
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        rule, bounds = self.scaler._rule, self.scaler._bounds
        if rule is None:
            scale, tracker = scale.clone(), tracker.clone()
            update.by_kernel(scale, tracker, torch.ones_like(scale), *self.scaler._numbers(), bounds=bounds)
            return tracker, scale
        state = rule.lowered(update.present(rule, kept(scale), kept(tracker)))
        return state, rule.tensor(state.scale).clamp(bounds.min_scale, bounds.max_scale)

    def lower(self, state: Any, scale: Tensor) -> None:
        """Backs off once."""
        self.retries += 1
        self.set(state, scale)

    def set(self, state: Any, scale: Tensor) -> None:
        """Makes a state and a scale, as `lowered` returns them, the present ones."""
        scaler, rule = self.scaler, self.scaler._rule
        scaler._bound.revalidate(scaler._scale)
        scaler._scale.copy_(scale)
        if rule is None:
            scaler._growth_tracker.copy_(state)
        else:
            rule.state = state
            rule.write(state.clean_steps, scaler._growth_tracker)
        scaler._bound.lowered(scaler._scale, by=update.lowest_factor(rule, scaler._backoff_factor))


def retried(scaler: Any, loss: Tensor, parameters: list[Tensor], retries: int, kwargs: dict[str, Any]) -> int:
    """Runs the backward pass of `loss`, again at lower scales while it overflows; returns how often.

    Synchronizes with the device once after every attempt. If the last attempt overflows too, or the backward pass
    raises, scale and rule are as before, and in the former case so is the scale of all gradients.
    """
    scaling = DropInScale(scaler)
    before, tracker = scaler._scale_for(loss.device).clone(), scaler._growth_tracker.clone()
    start = tracker if scaler._rule is None else update.present(scaler._rule, kept(before), kept(tracker))
    finite = (local(loss.detach()) * 0 == 0).all().to(before.device)
    stash = Stash(parameters)
    try:
        overflowed = attempt(loss, finite, scaling, stash, Tensor.tolist, retries, kwargs)
    except BaseException:
        stash.restore()
        if scaling.retries:
            scaling.set(start, before)
        raise
    ratio = scaling.scale / before
    if scaling.retries and overflowed:
        # The `update` that follows backs off once, from the scale that all gradients have again.
        stash.multiply(1.0 / ratio)
        scaling.set(start, before)
    stash.merge(ratio if scaling.retries and not overflowed else None)
    return scaling.retries
