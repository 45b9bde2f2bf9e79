"""Running the backward pass again at a lower scale when it overflows, inside the compiled step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.jax.agree import anywhere, mapped_axes, zeros
from gradscale.jax.step import Asked, Attempt, attempt
from gradscale.policies.contract import Policy, Seen, backed_off

Pull = Callable[[Array], Sequence[Array]]
"""Returns the gradients that a backward pass started with this scale makes."""


class _Try(NamedTuple):
    """What the loop carries: the next state to try, whether to try it, and the attempt before."""

    state: Any
    again: Array
    tried: Array
    last: Attempt


def attempts(policy: Policy, state: Any, pull: Pull, loss_finite: Array, asked: Asked, retries: int) -> Attempt:
    """Returns the last attempt: the first that does not overflow, or the one after which there is nothing to try.

    A retry backs off once, whatever the hysteresis says. There is none under `Static`, at the floor, or for a loss that
    is not finite. That is agreed on before the loop: a device that left it alone would leave the others waiting.
    The first attempt runs inside the loop too, so that the backward pass is compiled once.
    """
    loss_finite = ~anywhere(~loss_finite, mapped_axes(asked.axis_names))

    def body(carry: _Try) -> _Try:
        last = attempt(policy, carry.state, pull(carry.state.scale), loss_finite, asked, carry.tried)
        lowered = backed_off(policy, carry.state, _overflow(), jnp)
        overflowed = loss_finite & ~last.measured.finite(carry.state.scale)
        again = overflowed & (carry.tried < retries) & (lowered.scale < carry.state.scale)
        return _Try(lowered, again, carry.tried + 1, last)

    first = _Try(state, jnp.bool_(True), jnp.int32(0), _blank(state, pull, loss_finite, policy, asked))
    return lax.while_loop(lambda carry: carry.again, body, first).last


def _overflow() -> Seen:
    return Seen(finite=jnp.bool_(False), loss_finite=jnp.bool_(True))


def _blank(state: Any, pull: Pull, loss_finite: Array, policy: Policy, asked: Asked) -> Attempt:
    """Returns an attempt of zeros, of the type of all attempts: a loop must start with something. Nothing is run."""
    kinds = jax.eval_shape(lambda: attempt(policy, state, pull(state.scale), loss_finite, asked))
    return jax.tree.map(zeros, kinds)
