"""The forward pass of any function of pytrees, and its backward pass from a scaled cotangent."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscale.jax.axes import Axes
from gradscale.jax.tree import Gradients, Split, is_nnx_object, split
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass that was run.

    Attributes:
        loss: what it returned, unscaled.
        aux: the auxiliary output; None without one.
        params: the arguments it was differentiated by.
        pullback: takes the cotangent of the loss to the gradients.
    """

    loss: Array
    aux: Any
    params: Split
    pullback: Callable[[Array], tuple[Gradients]]

    def gradients(self, scale: Array, axes: Axes) -> Gradients:
        """Runs the backward pass from `scale` and returns the scaled gradients, averaged if the caller asked for it."""
        # `ones_like` gives the cotangent the loss's type and varying axes, which `shard_map` with `check_vma=True`
        # requires of it. A bare scale has none.
        (gradients,) = self.pullback((jnp.ones_like(self.loss) * scale).astype(self.loss.dtype))
        return axes.averaged(gradients)


def checked_argnums(argnums: Any) -> int | tuple[int, ...]:
    """Returns the positions of the arguments to differentiate as Python integers; raises if one is no integer."""
    wanted = argnums if isinstance(argnums, Sequence) else (argnums,)
    integers = (isinstance(each, int | np.integer) and not isinstance(each, bool) for each in wanted)
    if isinstance(argnums, str) or not all(integers):
        raise TypeError(f"`argnums` must be an integer, or a tuple of them. Received: argnums={argnums!r}.")
    return tuple(map(int, argnums)) if isinstance(argnums, Sequence) else int(argnums)


def forward(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    policy: Policy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Forward:
    """Runs `fun` and returns its backward pass, which can be run any number of times."""
    is_one = isinstance(argnums, int)
    chosen = _positions(argnums, len(args))
    wanted = tuple(args[position] for position in chosen)
    params = split(wanted[0] if is_one else wanted, "the arguments to differentiate")
    for position in chosen:
        _check_modules(args[position])
    # All arguments are flattened, and rebuilt inside the differentiated function: flax nnx allows a variable to be
    # changed only at the trace level where it was made, and `nnx.merge` uses the variables it is given. Whole nnx
    # modules that are not differentiated are passed as they are: flax then refuses a change, which a copy would lose.
    rest = [None if position in chosen else arg for position, arg in enumerate(args)]
    others, structure = jax.tree.flatten((rest, kwargs), is_leaf=is_nnx_object)

    def run(leaves: Gradients) -> tuple[Array, Any]:
        filled, keywords = structure.unflatten(others)
        values = params.filled(leaves)
        for position, value in zip(chosen, (values,) if is_one else values, strict=True):
            filled[position] = value
        return _loss_and_aux(fun(*filled, **keywords), has_aux, policy)

    loss, pullback, aux = jax.vjp(run, params.differentiable, has_aux=True)
    return Forward(loss, aux, params, pullback)


def checked_loss(loss: Any, policy: Policy) -> Array:
    """Returns `loss` as an array; raises if the scale cannot multiply it, or its cotangent, exactly."""
    if loss is None or isinstance(loss, tuple | list | dict):
        raise TypeError(
            "A loss must be one number. "
            f"Received: {type(loss).__name__}. If it holds a loss and something else, pass `has_aux=True`."
        )
    value = jnp.asarray(loss)
    # JAX accepts an integer loss without an error, and all gradients are zero.
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"A loss must be a floating-point number. Received: {value.dtype.name}.")
    if value.dtype == jnp.bfloat16 and multiplies(policy):
        raise TypeError(
            "A loss must be float32 or wider to be scaled. Received: bfloat16. BF16 needs no loss scaling: use "
            "`Scaler(NoScaling())`, or `Scaler(CheckOnly())` to skip steps that are not finite; or cast the outputs "
            "before the loss is computed: `outputs.astype('float32')`."
        )
    if value.dtype.itemsize < 4 and multiplies(policy):
        raise TypeError(
            f"A loss must be float32 or wider, as a scale like 65536 does not fit a narrower type. "
            f"Received: {value.dtype.name}. Cast the model's outputs before the loss is computed: "
            "`outputs.astype('float32')`."
        )
    return value


def _loss_and_aux(returned: Any, has_aux: bool, policy: Policy) -> tuple[Array, Any]:
    """Returns the loss, checked, and the auxiliary output."""
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"With `has_aux=True`, `fun` must return (loss, aux). Received: {type(returned).__name__}.")
    loss, aux = returned if has_aux else (returned, None)
    loss = checked_loss(loss, policy)
    if loss.shape:
        raise TypeError(
            "`fun` must return a loss without dimensions. "
            f"Received: shape {loss.shape}. Take the mean, or map over the examples with `jax.vmap`."
        )
    return loss, aux


def _positions(argnums: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the positions among `count` arguments, none of them negative; raises if there is none, or one twice."""
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    if any(not -count <= position < count for position in wanted):
        raise ValueError(
            "`argnums` counts the positional arguments after the scaler. "
            f"Received: argnums={argnums!r} and {count} of them."
        )
    chosen = tuple(position % count for position in wanted)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"`argnums` must name each argument at most once. Received: argnums={argnums!r}.")
    return chosen


def _check_modules(argument: Any) -> None:
    """Raises if `argument`, to be differentiated, is or holds a module of flax nnx with more than parameters.

    `forward` copies it: updates of its statistics would be lost, and an optimizer would train them.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    for module in filter(is_nnx_object, jax.tree.leaves(argument, is_leaf=is_nnx_object)):
        state = nnx.state(module, nnx.Not(nnx.Param))
        rest = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        if kinds := {type(node).__name__ for node in rest}:
            raise TypeError(
                "A module of flax nnx to differentiate must hold parameters only, as updates of its other state are "
                f"lost. Received: a {type(module).__name__} with {sorted(kinds)}. Take it apart, `structure, params, "
                "rest = nnx.split(model, nnx.Param, ...)`, differentiate by `params`, and call `nnx.merge` inside "
                "`fun`."
            )
