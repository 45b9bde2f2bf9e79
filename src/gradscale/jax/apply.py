"""Apply, the fourth stage: parameters and optimizer state change together, behind one gate."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import optax
from jax import lax
from jax.core import Tracer

from gradscale.jax.optimizer import check_wide_state, trainable, update
from gradscale.jax.remember import StepResult
from gradscale.jax.scaler import Scaler
from gradscale.jax.tree import OVERWRITE_WITH_GRADIENT, Gradients, Leaf, holds, split

T = TypeVar("T")

Gate = Literal["cond", "where"]
"""How to gate: a branch that runs the optimizer only if the step is applied, or a choice after it has run."""


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

    The update of the optimizer and its addition to the parameters are behind one gate, so a skipped step also leaves
    moments, schedules and counters unchanged. Integer leaves are never changed, not even by weight decay. Leaves in
    flax's collection `_overwrite_with_gradient` are replaced by their gradients; the optimizer never gets them. Does
    not synchronize with the device.

    Args:
        tx: an optax transformation; not one of `scaled`, which has its own gate.
        grads: unscaled gradients, as `value_and_grad` returns them.
        opt_state: its state. Make it with `init` where parameters are narrower than float32. That of
            `params["params"]` alone, as flax's `TrainState` makes it for FP8 layers, is taken too.
        params: the parameters.
        result: the result that `value_and_grad` returned with the gradients.
        gate: `"cond"` runs the optimizer only if the step is applied; `"where"` always runs it and selects, which
            copies its state but has no branch. Measure on your device which is faster. Outside `jit` it is always
            `"where"`.
        **extra: further arguments for `tx.update`, such as `value=loss`.

    Raises:
        TypeError: `result` is not a `StepResult`, or the optimizer changed the type of its state, as moments of FP16
            parameters do.
        ValueError: `gate` is neither, `tx` is one of `scaled`, or gradients and parameters are different pytrees.
    """
    _check(opt_state, result, gate)

    if _is_state_of_flax(tx, opt_state, params):
        inner, after = apply(tx, grads["params"], opt_state, params["params"], result, gate=gate, **extra)
        old, new = params[OVERWRITE_WITH_GRADIENT], grads[OVERWRITE_WITH_GRADIENT]
        overwritten = result.select(new, old) if result.gated else new
        return type(params)({**params, "params": inner, OVERWRITE_WITH_GRADIENT: overwritten}), after
    check_wide_state(tx, opt_state, params)
    parts = split(params, "params")

    def change() -> tuple[Gradients, Any]:
        updates, after = update(tx, grads, opt_state, params, extra)
        changes = split(updates, "updates").differentiable
        added: Any = optax.apply_updates(parts.of(Leaf.TRAINED), changes.trained)
        return Gradients(added, changes.overwrites), after

    if not result.attempted:
        return params, opt_state
    # Only what changes goes through the gate, which takes nothing but arrays.
    leaves, after = gated(result, change, lambda: (parts.differentiable, opt_state), gate)
    return parts.filled(leaves), after


def gated(result: StepResult, change: Callable[[], T], keep: Callable[[], T], gate: Gate = "cond") -> T:
    """Returns what `change` returns if the step is applied, else what `keep` does. Does not synchronize."""
    if not result.gated:
        return change()
    # Outside `jit`, JAX would compile the branches again at every call. Inside, `where` would add a copy of every
    # array: 15 of full size with Adam, where `cond` with donated arguments has 5.
    if gate == "cond" and isinstance(result.applied, Tracer):
        return lax.cond(result.applied, change, keep)
    return result.select(change(), keep())


def check_accumulation(opt_state: Any, clip_norm: float | None) -> None:
    """Raises if gradients would be clipped one micro-batch at a time."""
    if clip_norm is not None and holds(optax.MultiStepsState, opt_state):
        raise ValueError(
            "`clip_norm` would clip each micro-batch alone, not the gradients that `optax.MultiSteps` accumulates. "
            f"Received: clip_norm={clip_norm!r}. Clip inside: "
            "`optax.MultiSteps(optax.chain(optax.clip_by_global_norm(bound), tx), every_k_schedule=k)`."
        )


def _is_state_of_flax(tx: optax.GradientTransformation, opt_state: Any, params: Any) -> bool:
    """Returns whether the state is that of `params["params"]` alone, as flax's `TrainState` makes it for FP8 layers."""
    if not isinstance(params, Mapping) or not {"params", OVERWRITE_WITH_GRADIENT} <= set(params):
        return False
    kinds = [jax.eval_shape(tx.init, trainable(each, wide=True)) for each in (params, params["params"])]
    own, theirs = map(jax.tree.structure, kinds)
    return own != theirs and jax.tree.structure(opt_state) == theirs


def _check(opt_state: Any, result: StepResult, gate: str) -> None:
    """Raises if the arguments of `apply` are not what it takes."""
    if gate not in ("cond", "where"):
        raise ValueError(f"`gate` must be 'cond' or 'where'. Received: gate={gate!r}.")
    if not isinstance(result, StepResult):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "`result` must be what `value_and_grad` or `Scaler.step` returned last. "
            f"Received: {type(result).__name__}. Write `apply(tx, grads, opt_state, params, result)`."
        )
    if holds(Scaler, opt_state):
        raise ValueError(
            "`apply` takes a plain optax transformation: `scaled` would divide unscaled gradients by the scale once "
            "more. Give `tx` itself, or use `scaled(tx)` without `value_and_grad` and `apply`."
        )
    check_accumulation(opt_state, result.clip_norm)
