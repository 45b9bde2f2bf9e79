"""The forward pass of any function of pytrees, and the backward pass to start from a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.jax.agree import varying_axes
from gradscale.jax.checks import check_modules, check_scalar, checked_loss, is_module
from gradscale.jax.tree import Split, split
from gradscale.policies.contract import Policy


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes and returns.

    Attributes:
        argnums: positions of the arguments to differentiate.
        has_aux: whether it returns something beside the loss.
    """

    argnums: int | tuple[int, ...]
    has_aux: bool

    def chosen(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions to differentiate, from 0 on.

        Raises:
            ValueError: there is no such argument, or one comes twice.
        """
        wanted = (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)
        if any(not -len(args) <= position < len(args) for position in wanted):
            raise ValueError(
                "`argnums` counts the positional arguments after the scaler. "
                f"Received: argnums={self.argnums!r} and {len(args)} of them."
            )
        chosen = tuple(position % len(args) for position in wanted)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"`argnums` must name each argument at most once. Received: argnums={self.argnums!r}.")
        return chosen

    def arguments(self, args: Sequence[Any]) -> Any:
        """Returns the arguments to differentiate: one, or a tuple of them."""
        chosen = [args[position] for position in self.chosen(args)]
        return chosen[0] if isinstance(self.argnums, int) else tuple(chosen)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass that was run.

    Attributes:
        loss: what it returned, unscaled.
        aux: what it returned beside the loss; None if nothing.
        params: the arguments it was differentiated by.
        pullback: takes the cotangent of the loss to the gradients.
    """

    loss: Array
    aux: Any
    params: Split
    pullback: Callable[[Array], tuple[tuple[Array, ...]]]

    def gradients(self, scale: Array, mean_axes: Sequence[str]) -> tuple[Array, ...]:
        """Runs the backward pass from `scale` and returns the scaled gradients, averaged over `mean_axes`."""
        # Of the loss's own type in every respect: a bare scale would not differ along mapped axes where the loss does.
        (gradients,) = self.pullback((jnp.ones_like(self.loss) * scale).astype(self.loss.dtype))
        return lax.pmean(gradients, tuple(mean_axes)) if mean_axes else gradients


def forward(
    fun: Callable[..., Any], signature: Signature, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]
) -> Forward:
    """Runs `fun` and returns all it takes to run its backward pass, as often as you like.

    All arguments are taken apart and put together again inside the differentiated function: variables of flax nnx may
    only be changed where they were made, and `nnx.merge` uses those it is given. Whole modules of flax nnx that are not
    differentiated go in as they are: flax then refuses a change, which would be lost with a copy.
    """
    params = split(signature.arguments(args), "the arguments to differentiate")
    chosen = signature.chosen(args)
    for position in chosen:
        check_modules(args[position])
    rest = [None if position in chosen else arg for position, arg in enumerate(args)]
    others, structure = jax.tree.flatten((rest, kwargs), is_leaf=is_module)

    def run(moving: tuple[Any, ...]) -> tuple[Array, Any]:
        filled, keywords = structure.unflatten(others)
        values = params.filled(moving)
        for position, value in zip(chosen, (values,) if isinstance(signature.argnums, int) else values, strict=True):
            filled[position] = value
        return _loss_and_aux(fun(*filled, **keywords), signature.has_aux, policy)

    loss, pullback, aux = jax.vjp(run, params.moving, has_aux=True)
    return Forward(loss, aux, params, pullback)


def check_mean(run: Forward, mean_axes: Sequence[str]) -> None:
    """Raises if JAX has added up the gradients already: their mean would be their sum."""
    known = varying_axes(jax.typeof(run.loss)) & set(mean_axes)
    if known and not all(known <= varying_axes(jax.typeof(leaf)) for leaf in run.params.moving):
        raise ValueError(
            "`mean_axes` is for `pmap` and for `shard_map` with `check_vma=False`, where each device has gradients of "
            f"its own. Here JAX adds them up over {sorted(known)} itself. Take the mean of the loss inside `fun` "
            "instead, with `jax.lax.pmean`."
        )


def _loss_and_aux(returned: Any, has_aux: bool, policy: Policy) -> tuple[Array, Any]:
    """Returns the loss, checked, and what came beside it."""
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"With `has_aux=True`, `fun` must return (loss, aux). Received: {type(returned).__name__}.")
    loss, aux = returned if has_aux else (returned, None)
    loss = checked_loss(loss, policy)
    check_scalar(loss)
    return loss, aux
