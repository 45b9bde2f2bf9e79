"""What an optax transformation makes of true gradients, with types and integer leaves looked after."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradscale.jax.tree import moves, split, without_keys
from gradscale.kernels.jax import wide_type


def init(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of `tx` for gradients in float32 or wider, as those of this package are.

    The same as `tx.init(params)` unless parameters are narrower, FP16 or BF16, or there are random keys among them.
    Moments of FP16 would lose what the scale saved, and would change their type at the first step.
    """
    parts = split(params, "params")
    wide = [jnp.asarray(leaf) for leaf in parts.moving]
    return tx.init(without_keys(parts.filled([leaf.astype(wide_type(leaf)) for leaf in wide])))


def updated(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns the updates that `tx` makes of true gradients, and its next state, of the same type as before.

    Integer leaves get an update of zero: weight decay would move them.

    Raises:
        TypeError: the state would change its type, as moments of FP16 parameters do.
        ValueError: gradients and parameters are different pytrees.
    """
    _check_alike(grads, params)
    updates, after = optax.with_extra_args_support(tx).update(grads, opt_state, without_keys(params), **extra)
    still = split(updates if params is None else params, "params")
    moving = [leaf for leaf, like in zip(jax.tree.leaves(updates), still.leaves, strict=True) if moves(like)]
    return still.gradients(moving), jax.tree.map(_same_type, opt_state, after)


def moved(params: Any, updates: Any) -> Any:
    """Returns parameters with updates added; leaves that are no floating-point numbers as they were."""
    parts = split(params, "params")
    moving: Any = optax.apply_updates(parts.moving, split(updates, "updates").moving)
    return parts.filled(moving)


def holds(kind: type, tree: Any) -> bool:
    """Returns whether there is a node of the class `kind` anywhere in `tree`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def _check_alike(grads: Any, params: Any) -> None:
    """Raises if there are parameters, and the gradients are not theirs; those of `optax.lookahead` are of the fast."""
    if params is None:
        return
    meant = params.fast if isinstance(params, optax.LookaheadParams) else params
    own, theirs = jax.tree.structure(grads), jax.tree.structure(meant)
    if own != theirs:
        raise ValueError(
            "Gradients must be a pytree of the same structure as the parameters they are of. "
            f"Received: gradients {own} and parameters {theirs}. Give what was differentiated as `params`."
        )
    for gradient, param in zip(jax.tree.leaves(grads), jax.tree.leaves(meant), strict=True):
        if jnp.shape(gradient) != jnp.shape(param):
            raise ValueError(
                "A gradient must have the shape of its parameter; it would be spread over it without a word. "
                f"Received: shape {jnp.shape(gradient)} for one of shape {jnp.shape(param)}."
            )


def _same_type(before: Any, after: Any) -> Any:
    """Returns `after` if it has the type of `before`; moments of integers, all zero, are brought back to it."""
    old, new = jnp.asarray(before), jnp.asarray(after)
    if old.dtype == new.dtype:
        return after
    if not moves(old):
        return new.astype(old.dtype)
    raise TypeError(
        "An optimizer must keep the type of its state, and gradients are float32 or wider here. "
        f"Received: {old.dtype.name} state that becomes {new.dtype.name}. "
        "Make the state with `gradscale.jax.init(tx, params)`."
    )
