"""The names of `mxnet.contrib.amp`, for a Gluon trainer: `init_trainer`, `scale_loss` and `unscale`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mxnet import autograd

from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.engine.hints import explains_arguments
from gradscale.mxnet.agree import Workers, init_params_and_wait
from gradscale.mxnet.apply import apply
from gradscale.mxnet.checks import check_compression, check_masters, check_optimizer, check_trainer, check_update_place
from gradscale.mxnet.gradients import collect, fresh, mark_stale
from gradscale.mxnet.remember import weights_of
from gradscale.mxnet.scaler import LossScaler
from gradscale.policies.checks import LOWEST_SCALE
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic

MXNETS_RULE = Dynamic(min_scale=LOWEST_SCALE, max_scale=2.0**24)
"""The rule of MXNet's amp without its lag of a step, and with a floor: MXNet's can reach zero, and stays there."""


@explains_arguments("init_trainer(trainer, policy={})")
def init_trainer(
    trainer: Any,
    policy: Policy | str | None = None,
    *,
    clip_norm: float | None = None,
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
    on_stuck: OnStuck = "raise",
    record: Any = None,
) -> LossScaler:
    """Adds loss scaling to `trainer`, whose `step` and `update` then skip an overflow, and returns the scaler.

    Call it right after the trainer is made. The trainer will update the weights itself: with several contexts, MXNet
    would let the key-value store update them, before an overflow can be found.

    Args:
        trainer: a `gluon.Trainer`.
        policy: the rule for the scale. By default that of MXNet's amp without its lag of a step, and with a floor of
            2**-126. A policy or its name, as for `LossScaler`.
        clip_norm: bound on the norm of all gradients together, unscaled and divided by the size of the batch.
        max_consecutive_skips: skipped steps in a row, with no lower scale left to try or a loss that is not finite,
            before the run is stuck.
        on_stuck: `"raise"` a `ScaleStuck` at every step, or once until a step is applied again: `"warn"` with its text,
            or call a function with it. `"ignore"` does nothing.
        record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
            `gradscale.recording`.

    Raises:
        TypeError: `trainer` is not a `gluon.Trainer`, `policy` not a policy, or `max_consecutive_skips` not an integer.
        ValueError: the trainer has a scaler already, cannot update the weights itself, compresses gradients, would
            compute in float16, or with scaled gradients; or an argument is out of range.
    """
    check_trainer(trainer)
    rule = MXNETS_RULE if policy is None else policy
    scaler = LossScaler(rule, max_consecutive_skips=max_consecutive_skips, on_stuck=on_stuck, record=record)
    scaler.clip_norm = clip_norm
    check_update_place(trainer)
    check_compression(trainer)
    check_optimizer(trainer, scaler.policy)
    check_masters(trainer, scaler.policy)
    # MXNet reads this when it makes the store, at the first step or save. With several contexts the default is True.
    trainer._kvstore_params["update_on_kvstore"] = False
    trainer._gradscale = scaler
    trainer._init_params = partial(init_params_and_wait, trainer._init_params)
    # `_update`, not `step`: `step` and `update` both call it, and `step` only after the gradients have been summed.
    trainer._update = partial(_update_if_finite, trainer, Workers(trainer), trainer._update)
    return scaler


def scaler_of(trainer: Any) -> LossScaler:
    """Returns the scaler of a trainer, which has its scale, last result, metrics and saved state.

    Raises:
        RuntimeError: the trainer has none.
    """
    scaler = getattr(trainer, "_gradscale", None)
    if scaler is None:
        raise RuntimeError(
            f"`trainer` must have a loss scaler. Received: {trainer!r}, without one. "
            "Call `gradscale.mxnet.init_trainer(trainer)` right after it is made."
        )
    return scaler


@contextmanager
def scale_loss(loss: Any, trainer: Any) -> Iterator[Any]:
    """Yields `loss` times the scale of the trainer, or a list of losses times it, for the backward pass.

    Args:
        loss: a loss, or a list or tuple of them: one per context, usually. In float32 or wider.
        trainer: the trainer of the parameters.

    Raises:
        RuntimeError: the trainer has no scaler, or MXNet is not recording.
        TypeError: a loss is not an array, or too narrow for the scale.
    """
    scaler = scaler_of(trainer)
    if not autograd.is_recording():
        raise RuntimeError(
            "`scale_loss` multiplies the loss, which MXNet must record to compute its gradients. "
            "Call it inside `with autograd.record():`."
        )
    yield scaler.scale(loss)


def unscale(trainer: Any) -> None:
    """Divides the gradients of a trainer by the scale, in place, for code that reads or edits them.

    Checks them first: an overflow skips the step that follows, even if it is edited away. Float16 gradients lose what
    is too small for float16. To clip the norm, `clip_norm` of `init_trainer` loses nothing, and is faster.

    Raises:
        RuntimeError: the trainer has no scaler, no loss was scaled since the last step, or this was called before.
    """
    scaler = scaler_of(trainer)
    scaler.check_scaled("unscale")
    scaler.unscale(fresh(collect(trainer)))


def _update_if_finite(
    trainer: Any, workers: Workers, update: Callable[[bool], None], ignore_stale_grad: bool = False
) -> None:
    """Updates the weights, unless a gradient is inf or NaN on any context. Replaces `Trainer._update`.

    MXNet calls it when the gradients of all contexts have been summed.
    """
    gradients = collect(trainer)
    to_apply = fresh(gradients)
    if not ignore_stale_grad and sum(map(len, to_apply)) < sum(map(len, gradients)):
        return update(ignore_stale_grad)  # raises about the stale gradient, as without gradscale
    scaler, optimizer = scaler_of(trainer), trainer._optimizer
    check_masters(trainer, scaler.policy)  # parameters may have been cast since `init_trainer`
    if any(to_apply):
        scaler.check_scaled("step")
    outcome, result = scaler.decide(to_apply, optimizer.rescale_grad, workers.all(*scaler.flags()))
    if result.applied:
        apply(to_apply, optimizer, float(outcome.factor), partial(update, ignore_stale_grad))
    else:
        mark_stale(to_apply)
    scaler.remember(outcome.state, result, partial(weights_of, trainer))
