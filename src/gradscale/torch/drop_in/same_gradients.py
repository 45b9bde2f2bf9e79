"""The last `update` of `GradScaler`, kept until there are new gradients: optimizers may be stepped for the same ones.

Lightning's manual optimization and Accelerate call `step` and `update` once for each optimizer of a backward pass. The
gradients of the second were made with the scale from before the first `update`, and both updates are those of one step.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.torch.step.decide import Position
from gradscale.torch.step.gradients import parameters_of
from gradscale.torch.step.host_copy import put

if TYPE_CHECKING:
    from gradscale.torch.drop_in.grad_scaler import GradScaler

Optimizer = torch.optim.Optimizer

States = dict[int, dict[str, Any]]
"""What is noted of each optimizer, by its id, as in torch's scaler."""


NONE_NOTED: States = {}
"""Nothing is noted of any optimizer. Never written to."""


class Start(NamedTuple):
    """What an `update` started from.

    Attributes:
        scale: the scale, as `kept`.
        tracker: the clean steps, as `kept`.
        rule: where the policy was; None for torch's own rule.
        states: what was noted of the optimizers.
        versions: those of the two tensors after the update. Other code may write to them.
    """

    scale: Any
    tracker: Any
    rule: Position | None
    states: States
    versions: tuple[int, int]

    def restored(self, scale: Tensor, tracker: Tensor) -> bool:
        """Sets both tensors to what they were before the update, and returns whether: not if others wrote to them."""
        if (scale._version, tracker._version) != self.versions:
            return False
        put(self.scale, scale)
        put(self.tracker, tracker)
        return True


class Updated(NamedTuple):
    """What the last `update` leaves for optimizers that are stepped on the same gradients after it.

    Attributes:
        made_with: the scale that made those gradients, as `kept`; None if they are not known to be the same.
        start: what the update started from, so that another merges with it; None where it may not.
        stepped: the optimizers that were stepped before it, by their id.
        unscaled: what was noted of optimizers whose gradients are divided already, and that were not stepped.
    """

    made_with: Any = None
    start: Start | None = None
    stepped: frozenset[int] = frozenset()
    unscaled: States = NONE_NOTED

    @staticmethod
    def after(states: States, start: Start, merges: bool, previous: "Updated | None") -> "Updated":
        """Returns what an `update` leaves.

        Args:
            states: what was noted of the optimizers.
            start: what the update started from.
            merges: whether another may merge with it.
            previous: what the update before it left, if there were no new gradients since.
        """
        if previous is None and all([state["stage"] is OptState.STEPPED for state in states.values()]):
            return Updated(start.scale, start if merges else None, frozenset(states))
        previous = Updated(start.scale) if previous is None else previous
        known = previous.made_with is not None or not states
        stepped = previous.stepped.union([key for key, state in states.items() if state["stage"] is OptState.STEPPED])
        divided = {key: state for key, state in states.items() if _is_divided(state)}
        unscaled = {key: state for key, state in (previous.unscaled | divided).items() if key not in stepped}
        return Updated(previous.made_with if known else start.scale, start if merges else None, stepped, unscaled)

    def scale(self, present: Tensor) -> Tensor:
        """Returns the scale that made the gradients, a tensor: the `present` one where it is not known."""
        if self.made_with is None:
            return present
        return self.made_with if isinstance(self.made_with, Tensor) else torch.full_like(present, self.made_with)

    def without_merge(self) -> "Updated":
        """Returns the same for gradients that are new, except those that are divided already."""
        return Updated(unscaled=self.unscaled)


def _is_divided(state: dict[str, Any]) -> bool:
    """Returns whether what was noted of an optimizer is that its gradients are divided, and not stepped on."""
    return state["stage"] is OptState.UNSCALED and bool(state["found_inf_per_device"])


def flags_of(states: States) -> list[Tensor]:
    """Returns all flags that were noted: whether gradients of an optimizer, on a device, were not finite."""
    return [flag for state in states.values() for flag in state["found_inf_per_device"].values()]


def divisor_of(scaler: "GradScaler", optimizer: Optimizer, method: str) -> Tensor:
    """Returns the scale that made the gradients of `optimizer`, which `method` needs: that of the last `scale`.

    Without `scale` and a backward pass since the last `update`, they are those that were there before it, unless the
    optimizer was stepped on them: then they are new, and taken to be made with the present scale.
    """
    if scaler._scale is None and (scaler._ranks.always or not scaler._multiplies):
        # A rank that never has a loss, such as the first stage of a pipeline; or a loop whose losses need no scale.
        scaler._lazy_init_scale_growth_tracker(next(parameters_of([optimizer])).device)
    scale, _ = scaler._check_scale_growth_tracker(method)
    updated = scaler._updated
    if updated is None:
        return scale
    key = id(optimizer)
    if key in updated.stepped:
        scaler._updated = updated.without_merge()
        return scale
    if key in updated.unscaled and scaler._per_optimizer_states[key]["stage"] is OptState.READY:
        scaler._per_optimizer_states[key] = updated.unscaled[key]
    if updated.made_with is None:
        return scale
    scaler._steps.resume_losses()
    return updated.scale(scale)
