"""Room four, apply: parameters and optimizer state move together, behind one gate."""

from typing import Any

import optax

from gradscale.jax.gate import Gate, gated
from gradscale.jax.optimizer import holds, moved, updated
from gradscale.jax.result import StepResult
from gradscale.jax.transformation import ScaledState, check_accumulation


def apply(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    result: StepResult,
    *,
    gate: Gate = "cond",
    **extra: Any,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state after the step, or both as they were if it is skipped.

    The update of the optimizer and its addition to the parameters sit behind one gate, so a skipped step also leaves
    moments, schedules and counters alone. Leaves that are no floating-point numbers stay as they are, weight decay or
    not. Does not wait for the device.

    Args:
        tx: an optax transformation; not one of `scaled`, which has a gate of its own.
        grads: true gradients, as `value_and_grad` returns them.
        opt_state: its state. Make it with `init` where parameters are narrower than float32.
        params: the parameters.
        result: what `value_and_grad` returned beside the gradients.
        gate: `"cond"` runs the optimizer only if the step is applied; `"where"` runs it always and chooses, which
            needs a copy of its state but no branch. Which is quicker on your device, you must measure. Outside of `jit`
            it is always `"where"`.
        **extra: further arguments for `tx.update`, such as `value=loss`.

    Raises:
        TypeError: `result` is not a `StepResult`, or the optimizer changed the type of its state, as moments of FP16
            parameters do.
        ValueError: `gate` is neither, `tx` cannot be right here, or gradients and parameters are different pytrees.
    """
    _check(opt_state, result, gate)

    def update() -> tuple[Any, Any]:
        updates, after = updated(tx, grads, opt_state, params, extra)
        return moved(params, updates), after

    if not result.attempted:
        return params, opt_state
    return gated(result, update, lambda: (params, opt_state), gate)


def _check(opt_state: Any, result: StepResult, gate: str) -> None:
    """Raises if the arguments of `apply` cannot be meant."""
    if gate not in ("cond", "where"):
        raise ValueError(f"`gate` must be 'cond' or 'where'. Received: gate={gate!r}.")
    if not isinstance(result, StepResult):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "`result` must be what `value_and_grad` or `Scaler.step` returned last. "
            f"Received: {type(result).__name__}. Write `apply(tx, grads, opt_state, params, result)`."
        )
    if holds(ScaledState, opt_state):
        raise ValueError(
            "`apply` takes a plain optax transformation: `scaled` would divide true gradients by the scale once more. "
            "Give `tx` itself, or use `scaled(tx)` without `value_and_grad` and `apply`."
        )
    check_accumulation(opt_state, result.clip_norm)
