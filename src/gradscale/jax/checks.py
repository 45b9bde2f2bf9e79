"""What the adapter refuses: policies that are not static, and losses that cannot be meant."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscale.policies.auto import as_policy
from gradscale.policies.contract import Policy


def static_policy(policy: Policy | Literal["auto"]) -> Policy:
    """Returns the policy that is meant; raises unless JAX can hash it: it is a static part of the scaler."""
    meant = as_policy(policy)
    try:
        hash(meant)
    except TypeError as error:
        raise TypeError(
            "The settings of a policy must be Python numbers, as JAX compiles one program for each of them. "
            f"Received: policy={policy!r}. For many policies at once make one scaler of each."
        ) from error
    return meant


def check_retries(retries: int) -> None:
    """Raises if `retries` is not an integer from 0 on."""
    if not is_integer(retries):
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")


def checked_argnums(argnums: int | Sequence[int]) -> int | tuple[int, ...]:
    """Returns a position, or several, as Python's integers; raises if there is anything else."""
    wanted = argnums if isinstance(argnums, Sequence) else (argnums,)
    if isinstance(argnums, str) or not all(is_integer(position) for position in wanted):
        raise TypeError(f"`argnums` must be an integer, or a tuple of them. Received: argnums={argnums!r}.")
    return tuple(int(position) for position in argnums) if isinstance(argnums, Sequence) else int(argnums)


def is_integer(value: object) -> bool:
    """Returns whether `value` is an integer, Python's or numpy's, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_loss(loss: Any, policy: Policy) -> Array:
    """Returns `loss` as an array; raises if the scale cannot multiply it, or its cotangent, exactly.

    JAX would take an integer loss without a word, and all gradients would be zero.
    """
    if loss is None or isinstance(loss, tuple | list | dict):
        raise TypeError(
            "A loss must be one number. "
            f"Received: {type(loss).__name__}. If it holds a loss and something else, pass `has_aux=True`."
        )
    value = jnp.asarray(loss)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"A loss must be a floating-point number. Received: {value.dtype.name}.")
    if value.dtype.itemsize < 4 and policy.needs:
        raise TypeError(
            f"A loss must be float32 or wider, as a scale like 65536 does not fit a narrower type. "
            f"Received: {value.dtype.name}. Cast what the model puts out, before the loss is taken of it: "
            "`outputs.astype('float32')`."
        )
    return value


def check_scalar(loss: Array) -> None:
    """Raises unless `loss` has no dimensions."""
    if loss.shape:
        raise TypeError(
            "`fun` must return a loss without dimensions. "
            f"Received: shape {loss.shape}. Take the mean, or map over the examples with `jax.vmap`."
        )


def is_module(node: Any) -> bool:
    """Returns whether `node` is an object of flax nnx that may change in a call: a module, or `Rngs`."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree)


def check_modules(argument: Any) -> None:
    """Raises if `argument`, to be differentiated, is or holds a module of flax nnx with more than parameters.

    It is copied on the way. The statistics it gathers would be lost, and an optimizer would train them.
    """
    for node in jax.tree.leaves(argument, is_leaf=is_module):
        if is_module(node):
            _check_module(node)


def _check_module(module: Any) -> None:
    nnx: Any = sys.modules["flax.nnx"]
    rest = nnx.state(module, nnx.Not(nnx.Param))
    kinds = {type(node).__name__ for node in jax.tree.leaves(rest, is_leaf=lambda node: isinstance(node, nnx.Variable))}
    if kinds:
        raise TypeError(
            "A module of flax nnx to differentiate must hold parameters only, as what it changes in itself is lost. "
            f"Received: a {type(module).__name__} with {sorted(kinds)}. Take it apart, `structure, params, rest = "
            "nnx.split(model, nnx.Param, ...)`, differentiate by `params`, and call `nnx.merge` inside `fun`."
        )
