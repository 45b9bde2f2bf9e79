"""`GradScaler.update`: ends the steps of all optimizers, or merges with the update before for the same gradients."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from gradscale.torch.drop_in import update
from gradscale.torch.drop_in.same_gradients import Start, States, Updated, flags_of
from gradscale.torch.step import host_copy
from gradscale.torch.step.host_copy import kept
from gradscale.torch.step.measure import merged_flag

if TYPE_CHECKING:
    from gradscale.torch.drop_in.grad_scaler import GradScaler


def close_steps(scaler: "GradScaler", scale: Tensor, tracker: Tensor, number: float | None) -> None:
    """Updates the scale and its tracker, or sets the scale to `number`, and counts what the update has ended.

    Raises:
        AssertionError: there is no `number`, and no gradient was checked since the last update.
        ScaleStuck: the run is stuck. The update is complete then.
    """
    states: States = dict(scaler._per_optimizer_states)
    flags = flags_of(states)
    if number is None:
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        if reopened := _reopened(scaler, scale, tracker):
            states = reopened | states
            flags = flags_of(states)
    found_inf = merged_flag(flags, scale.device)
    results = scaler._steps.pending(found_inf, scale)
    _set_scale(scaler, scale, tracker, number, found_inf, states)
    for result in results:
        result.next_scale = scale.clone()
    if not flags:
        discard_steps(scaler)
        return
    _forget_optimizers(scaler)
    at_floor = False if scaler._rule is None else scaler._rule.state.stuck
    # Last: it may raise, and the update is complete by then.
    scaler._steps.close(results, found_inf, scaler._bounds.min_scale, at_floor)


def discard_steps(scaler: "GradScaler") -> None:
    """Forgets what was noted of optimizers, losses and steps since the last update."""
    _forget_optimizers(scaler)
    scaler._steps.discard()


def _forget_optimizers(scaler: "GradScaler") -> None:
    scaler._divided.clear()
    scaler._leaves.clear()
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def _reopened(scaler: "GradScaler", scale: Tensor, tracker: Tensor) -> States:
    """Takes the last update back if this one is for the same gradients, and returns what was noted for it."""
    start = None if scaler._updated is None else scaler._updated.start
    if start is None or not start.restored(scale, tracker):
        return {}
    if scaler._rule is not None and start.rule is not None:
        scaler._rule.go_back(start.rule)
    scaler._steps.reopen()
    return start.states


def _set_scale(
    scaler: "GradScaler", scale: Tensor, tracker: Tensor, number: float | None, found_inf: Tensor, states: States
) -> None:
    """Sets the scale to `number`, or as the rule says, and notes what the update started from."""
    rule = None if scaler._rule is None else scaler._rule.position
    before = kept(scale), kept(tracker)
    if number is None:
        _follow_rule(scaler, scale, tracker, found_inf, states, before)
    else:
        scaler._bound.set(scale.fill_(number), number)
    start = Start(*before, rule, states, (scale._version, tracker._version))
    scaler._updated = Updated.after(states, start, merges=number is None, previous=scaler._updated)


def _follow_rule(
    scaler: "GradScaler",
    scale: Tensor,
    tracker: Tensor,
    found_inf: Tensor,
    states: States,
    before: tuple[Any, Any],
) -> None:
    """Updates the scale and its tracker as the rule says. `before` has both as `kept`."""
    tracks = not host_copy.in_host_memory(scale.device)  # else the scale is read, and needs no bound
    if tracks:
        # Before the update, which changes the version that distinguishes writes by others.
        scaler._bound.revalidate(scale)
    rule, updated = scaler._rule, scaler._updated
    if rule is None:
        update.by_kernel(scale, tracker, found_inf, *scaler._numbers(), scaler._bounds)
    else:
        made_with = scale if updated is None else updated.scale(scale)
        sizes = [state["sizes"] for state in states.values() if "sizes" in state]
        loss_finite = scaler._ranks.loss_finite(states.values(), scaler._steps.losses, scale.device)
        step = (sizes, found_inf, made_with, loss_finite)
        update.by_policy(rule, scale, tracker, step, before, scaler._bounds)
    if tracks:
        scaler._bound.lowered(scale, by=update.lowest_factor(rule, scaler._backoff_factor))
