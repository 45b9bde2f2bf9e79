"""One step: measure, agree, decide, apply, remember."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from gradscale.engine.decide import Outcome, decide
from gradscale.engine.measurement import NOTHING_READ
from gradscale.keras.backends import Update
from gradscale.keras.measure import BACKEND, Gradients, all_finite, measure, measured, overwrites, plan_of
from gradscale.policies.contract import Seen
from gradscale.policies.static import multiplies
from gradscale.record import Array


class Step(NamedTuple):
    """A step that was run.

    Attributes:
        scale: the scale that made the gradients.
        sizes: a size of each, not finite where it is not; None where nothing was read.
        seen: what was found in them, unscaled.
        outcome: what was decided.
    """

    scale: Array
    sizes: Array | None
    seen: Seen
    outcome: Outcome


def run_step(optimizer: Any, gradients: Gradients, loss: Any, *, norm: bool, kinds: bool) -> Step:
    """Runs the inner optimizer if the gradients are finite, and updates the scale.

    Without a `loss`, those that `scale_loss` has seen count. With `kinds`, also measures which gradients hold a NaN.
    Synchronizes with the device on torch only.
    """
    policy, inner = optimizer.policy, optimizer.inner_optimizer
    scaled_finite = optimizer.losses.take(gradients)
    loss_finite = scaled_finite if loss is None else all_finite(loss)
    if optimizer.recorder is not None:
        optimizer.recorder(gradients, optimizer.dynamic_scale.value)

    def finish(numbers: Any, update: Update) -> Step:
        state = optimizer.read_state(BACKEND.leaves)
        measurement, seen = (NOTHING_READ, Seen()) if plan is None else measured(plan, numbers, state.scale)
        outcome = decide(policy, state, seen, BACKEND.XP)
        # `NoScaling` skips nothing. Without a gate it has no `cond`, through which every variable would pass.
        if policy.needs:
            changing = [*optimizer.trainable_variables, *inner.variables]
            BACKEND.gate(outcome.applied, lambda: update(outcome.factor), changing, inner.assign)
        else:
            update(outcome.factor)
        # After the update: if the inner optimizer raises, the state of the scale is unchanged.
        optimizer.write_state(outcome.state, BACKEND.vector)
        return Step(state.scale, measurement.sizes, seen, outcome)

    def update(grads: Sequence[Any], variables: Sequence[Any], factor: Array) -> None:
        wide = unscaled(grads, variables, factor, multiplied=multiplies(policy))
        inner.apply(_for_accumulation(inner, wide, variables), variables)

    # On each replica, before `merge_call`: MirroredStrategy reduces gradients inside the inner optimizer, after the
    # decision. A check of one replica's gradients would let another's inf into the weights, as Keras's class does.
    plan = plan_of(policy, gradients, norm=norm, kinds=kinds)
    numbers = None if plan is None else measure(plan, [grad for grad, _ in gradients.present], loss_finite)
    return BACKEND.merge_call(finish, numbers, update, gradients.grads, gradients.variables)


def _for_accumulation(inner: Any, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients in the types of the accumulators of `inner`; as they are where it has none."""
    # Keras keeps accumulators in the type of the variables, and adds without a cast, which fails for another type.
    if not inner.gradient_accumulation_steps:
        return grads
    pairs = zip(grads, variables, strict=True)
    return [grad if grad is None else keras.ops.cast(grad, variable.dtype) for grad, variable in pairs]


def unscaled(grads: Sequence[Any], variables: Sequence[Any], factor: Array, *, multiplied: bool = True) -> list[Any]:
    """Returns the gradients multiplied by the factor that unscales them, in float32 or wider.

    A gradient that overwrites its variable is returned as it is: the scale of the loss has not multiplied it. Unless
    they are `multiplied`, the factor is 1, and so are all that are wide enough.
    """
    scaled = [
        grad is not None and not overwrites(variable) and (multiplied or is_narrow(grad))
        for grad, variable in zip(grads, variables, strict=True)
    ]
    chosen = [grad for grad, is_scaled in zip(grads, scaled, strict=True) if is_scaled]
    products = iter(BACKEND.multiplied(chosen, factor))
    return [next(products) if is_scaled else grad for grad, is_scaled in zip(grads, scaled, strict=True)]


def is_narrow(array: Any) -> bool:
    """Returns whether an array, or a number, is narrower than float32."""
    return keras.backend.standardize_dtype(getattr(array, "dtype", "float32")) in ("float16", "bfloat16")
