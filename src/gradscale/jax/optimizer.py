"""An optax optimizer on unscaled gradients: the leaves it gets, the types it computes in, and those it keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradscale.jax.tree import Gradients, Leaf, Split, is_inexact, split
from gradscale.kernels.jax import wide_type


def init(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state of `tx` for gradients in float32 or wider, as those of this package are.

    The same as `tx.init(params)` unless parameters are narrower, FP16 or BF16, or there are leaves among them that an
    optimizer cannot train: random keys, leaves that are overwritten with their gradient, and what is no array. Moments
    in FP16 would lose the small gradients that the scale preserved.
    """
    return tx.init(trainable(params, wide=True))


def trainable(params: Any, *, wide: bool) -> Any:
    """Returns parameters as an optimizer gets them, in float32 at least with `wide`.

    In place of leaves that are overwritten with their gradient, and of random keys, there are zeros, which add nothing
    to a norm; None in place of what is no array.
    """
    parts = split(params, "params")
    leaves = parts.of(Leaf.TRAINED)
    return parts.trainable([_widened(leaf) for leaf in leaves] if wide else leaves)


def update(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns the updates of `tx` for unscaled gradients, and its next state, of the same types as before.

    The optimizer computes in float32 or wider, whatever the types of parameters and state. Where a leaf is overwritten
    with its gradient, that is its update; constant leaves get zeros.

    Raises:
        TypeError: a real state would become complex.
        ValueError: gradients and parameters are different pytrees.
    """
    own = split(grads, "grads")
    parts = own if params is None else split(params, "params")
    _check_same_tree(own, params)
    given = trainable(grads if params is None else params, wide=True)
    state = with_wide_leaves(tx, opt_state, given)
    # optax would take `MultiSteps`, which is not of its class, for a transformation without further arguments.
    optimizer = tx if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx)
    updates, after = optimizer.update(
        trainable(grads, wide=True), state, None if params is None else given, **jax.tree.map(_widened, extra)
    )
    # optax updates every leaf, and weight decay would change an integer: its update is replaced by zero.
    pairs = zip(jax.tree.leaves(updates), (kind for kind in parts.kinds if kind is not Leaf.STATIC), strict=True)
    trained = tuple(leaf for leaf, kind in pairs if kind is Leaf.TRAINED)
    overwrites = _repeated(own.of(Leaf.OVERWRITTEN), len(parts.of(Leaf.OVERWRITTEN)))
    return parts.gradients(Gradients(trained, overwrites)), jax.tree.map(_as_before, opt_state, after)


def in_types_of(updates: Any, grads: Any, params: Any) -> Any:
    """Returns updates in the types in which optax alone would give them: those of gradients and parameters."""
    parts = split(updates, "updates")
    trained = parts.of(Leaf.TRAINED)
    gradients = _repeated(split(grads, "grads").of(Leaf.TRAINED), len(trained))
    likes = gradients if params is None else split(params, "params").of(Leaf.TRAINED)
    cast = tuple(leaf.astype(_common_type(*like)) for leaf, *like in zip(trained, gradients, likes, strict=True))
    return parts.filled(Gradients(cast, parts.of(Leaf.OVERWRITTEN)))


def with_wide_leaves(tx: optax.GradientTransformation, opt_state: Any, params: Any) -> Any:
    """Returns the state with those leaves widened that `tx` keeps in float32 for parameters in float32."""
    if not any(map(_is_narrow, jax.tree.leaves(opt_state))):
        return opt_state
    # Only those: a type that was chosen, such as `mu_dtype`, is expected by the optimizer. Traced, not run.
    kinds = jax.eval_shape(tx.init, params)
    if jax.tree.structure(kinds) != jax.tree.structure(opt_state):
        return opt_state
    return jax.tree.map(
        lambda leaf, kind: leaf.astype(kind.dtype) if _is_narrow(leaf) and is_inexact(kind) else leaf, opt_state, kinds
    )


def check_wide_state(tx: optax.GradientTransformation, opt_state: Any, params: Any) -> None:
    """Raises if a state is narrower than float32 only because the parameters are."""
    wide = with_wide_leaves(tx, opt_state, trainable(params, wide=True))
    for old, new in zip(jax.tree.leaves(opt_state), jax.tree.leaves(wide), strict=True):
        if old is not new and old.dtype != new.dtype:
            raise TypeError(
                "An optimizer must keep the type of its state, and gradients are float32 or wider here. "
                f"Received: {old.dtype.name} state that becomes {new.dtype.name}. "
                "Make the state with `gradscale.jax.init(tx, params)`."
            )


def _repeated(leaves: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Returns leaves of gradients for `count` leaves of parameters: twice as many with `optax.lookahead`."""
    return leaves * (count // len(leaves)) if leaves else ()


def _common_type(left: Any, right: Any) -> Any:
    """Returns the type of both. JAX has none for two different types of 8 bits."""
    same = hasattr(left, "dtype") and hasattr(right, "dtype") and left.dtype == right.dtype
    return left.dtype if same else jnp.result_type(left, right)


def _is_narrow(leaf: Any) -> bool:
    """Returns whether `leaf` is an array of floating-point numbers narrower than float32."""
    return hasattr(leaf, "dtype") and is_inexact(leaf) and leaf.dtype.itemsize < 4


def _widened(leaf: Any) -> Any:
    """Returns an array in float32 if it is narrower; anything else as it is."""
    return jnp.asarray(leaf).astype(wide_type(leaf)) if _is_narrow(leaf) else leaf


def _as_before(before: Any, after: Any) -> Any:
    """Returns `after` in the type of `before`: another type would compile the step again, and a branch refuses it."""
    old, new = jnp.asarray(before), jnp.asarray(after)
    if old.dtype == new.dtype:
        return after
    if jnp.iscomplexobj(new) and not jnp.iscomplexobj(old):
        raise TypeError(
            "An optimizer must keep the type of its state. "
            f"Received: {old.dtype.name} state that becomes {new.dtype.name}. "
            "Choose a complex type for it, such as `mu_dtype`, or none."
        )
    return new.astype(old.dtype)


def _check_same_tree(grads: Split, params: Any) -> None:
    """Raises if parameters are given and the gradients have another structure or other shapes."""
    if params is None:
        return
    # `optax.lookahead` keeps two copies of the parameters, and takes gradients of the fast one.
    expected = split(params.fast if isinstance(params, optax.LookaheadParams) else params, "params")
    # Gradients have None for what is no array.
    theirs = jax.tree.structure(expected.gradients(expected.differentiable))
    if grads.structure != theirs:
        raise ValueError(
            "Gradients must be a pytree of the same structure as the parameters. "
            f"Received: gradients {grads.structure} and parameters {theirs}. Give what was differentiated as `params`."
        )
    arrays = (leaf for leaf, kind in zip(expected.leaves, expected.kinds, strict=True) if kind is not Leaf.STATIC)
    for gradient, param in zip(grads.leaves, arrays, strict=True):
        if jnp.shape(gradient) != jnp.shape(param):
            raise ValueError(
                "A gradient must have the shape of its parameter; it would be broadcast without an error. "
                f"Received: shape {jnp.shape(gradient)} for one of shape {jnp.shape(param)}."
            )
