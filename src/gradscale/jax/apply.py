"""Apply, the fourth stage: parameters and optimizer state change together, behind one gate."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from gradscale.jax.remember import StepResult
from gradscale.jax.scaler import Scaler
from gradscale.jax.tree import is_differentiable, split, without_keys
from gradscale.kernels.jax import wide_type

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
    moments, schedules and counters unchanged. Integer leaves are never changed, not even by weight decay. Does not
    synchronize with the device.

    Args:
        tx: an optax transformation; not one of `scaled`, which has its own gate.
        grads: unscaled gradients, as `value_and_grad` returns them.
        opt_state: its state. Make it with `init` where parameters are narrower than float32.
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

    def change() -> tuple[Any, Any]:
        updates, after = update(tx, grads, opt_state, params, extra)
        return _apply_updates(params, updates), after

    if not result.attempted:
        return params, opt_state
    return gated(result, change, lambda: (params, opt_state), gate)


def gated(result: StepResult, change: Callable[[], T], keep: Callable[[], T], gate: Gate = "cond") -> T:
    """Returns what `change` returns if the step is applied, else what `keep` does. Does not synchronize."""
    if not result.gated:
        return change()
    # Outside `jit`, JAX would compile the branches again at every call. Inside, `where` would add a copy of every
    # array: 15 of full size with Adam, where `cond` with donated arguments has 5.
    if gate == "cond" and isinstance(result.applied, Tracer):
        return lax.cond(result.applied, change, keep)
    return result.select(change(), keep())


def init(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of `tx` for gradients in float32 or wider, as those of this package are.

    The same as `tx.init(params)` unless parameters are narrower, FP16 or BF16, or there are random keys among them.
    Moments in FP16 would lose the small gradients that the scale preserved, and change their type at the first step.
    """
    parts = split(params, "params")
    leaves = [jnp.asarray(leaf) for leaf in parts.differentiable]
    return tx.init(without_keys(parts.filled([leaf.astype(wide_type(leaf)) for leaf in leaves])))


def update(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns the updates of `tx` for unscaled gradients, and its next state, of the same type as before.

    Raises:
        TypeError: the state would change its type, as moments of FP16 parameters do.
        ValueError: gradients and parameters are different pytrees.
    """
    _check_same_tree(grads, params)
    updates, after = optax.with_extra_args_support(tx).update(grads, opt_state, without_keys(params), **extra)
    # optax updates every leaf, and weight decay would change an integer: its update is replaced by zero.
    parts = split(updates if params is None else params, "params")
    pairs = zip(jax.tree.leaves(updates), parts.leaves, strict=True)
    kept = [leaf for leaf, like in pairs if is_differentiable(like)]
    return parts.gradients(kept), jax.tree.map(_same_type, opt_state, after)


def holds(kind: type, tree: Any) -> bool:
    """Returns whether there is a node of the class `kind` anywhere in `tree`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def check_accumulation(opt_state: Any, clip_norm: float | None) -> None:
    """Raises if gradients would be clipped one micro-batch at a time."""
    if clip_norm is not None and holds(optax.MultiStepsState, opt_state):
        raise ValueError(
            "`clip_norm` would clip each micro-batch alone, not the gradients that `optax.MultiSteps` accumulates. "
            f"Received: clip_norm={clip_norm!r}. Clip inside: "
            "`optax.MultiSteps(optax.chain(optax.clip_by_global_norm(bound), tx), every_k_schedule=k)`."
        )


def _apply_updates(params: Any, updates: Any) -> Any:
    """Returns parameters with updates added; integer leaves as they were."""
    parts = split(params, "params")
    added: Any = optax.apply_updates(parts.differentiable, split(updates, "updates").differentiable)
    return parts.filled(added)


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


def _check_same_tree(grads: Any, params: Any) -> None:
    """Raises if parameters are given and the gradients have another structure or other shapes."""
    if params is None:
        return
    # `optax.lookahead` keeps two copies of the parameters, and takes gradients of the fast one.
    expected = params.fast if isinstance(params, optax.LookaheadParams) else params
    own, theirs = jax.tree.structure(grads), jax.tree.structure(expected)
    if own != theirs:
        raise ValueError(
            "Gradients must be a pytree of the same structure as the parameters. "
            f"Received: gradients {own} and parameters {theirs}. Give what was differentiated as `params`."
        )
    for gradient, param in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        if jnp.shape(gradient) != jnp.shape(param):
            raise ValueError(
                "A gradient must have the shape of its parameter; it would be broadcast without an error. "
                f"Received: shape {jnp.shape(gradient)} for one of shape {jnp.shape(param)}."
            )


def _same_type(before: Any, after: Any) -> Any:
    """Returns `after` if it has the type of `before`; raises otherwise, as the step would be compiled again."""
    # Moments of integer leaves are all zero, and can be cast back.
    old, new = jnp.asarray(before), jnp.asarray(after)
    if old.dtype == new.dtype:
        return after
    if not is_differentiable(old):
        return new.astype(old.dtype)
    raise TypeError(
        "An optimizer must keep the type of its state, and gradients are float32 or wider here. "
        f"Received: {old.dtype.name} state that becomes {new.dtype.name}. "
        "Make the state with `gradscale.jax.init(tx, params)`."
    )
