"""Running the backward pass again at a lower scale when it overflows, inside the compiled step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.jax.agree import anywhere, zeros
from gradscale.jax.step import Attempt, Step
from gradscale.jax.tree import Gradients
from gradscale.policies.contract import Seen, backed_off

Pull = Callable[[Array], Gradients]
"""Returns the gradients that a backward pass started with this scale makes."""


class _Carry(NamedTuple):
    """The loop's carry: the next state to try, whether to try it, the attempts made, and the last of them."""

    state: Any
    again: Array
    tried: Array
    last: Attempt


def attempts(step: Step, state: Any, pull: Pull, loss_finite: Array, retries: int) -> tuple[Attempt, Array]:
    """Returns the first attempt that does not overflow, or the last that is allowed, and how many came before it.

    A retry backs off once, whatever the hysteresis says. There is none under `Static`, at the lowest scale, or for a
    loss that is not finite.
    """
    # Agreed on before the loop: a device that left it alone would leave the others blocked in an all-reduce.
    loss_finite = ~anywhere(~loss_finite, step.axes.shared)

    def body(carry: _Carry) -> _Carry:
        last = step.attempt(carry.state, pull(carry.state.scale), loss_finite)
        lowered = backed_off(step.policy, carry.state, _overflow(), jnp)
        overflowed = loss_finite & ~last.agreed.measurement.finite(carry.state.scale, jnp)
        again = overflowed & last.agreed.in_sync & (carry.tried < retries) & (lowered.scale < carry.state.scale)
        return _Carry(lowered, again, carry.tried + 1, last)

    # The first attempt runs inside the loop too, so that the backward pass is compiled once: a peeled one had 28
    # matrix products in the HLO instead of 17. The carry starts as zeros of the type of an attempt; nothing is run.
    kinds = jax.eval_shape(lambda: step.attempt(state, pull(state.scale), loss_finite))
    first = _Carry(state, jnp.bool_(True), jnp.int32(0), jax.tree.map(zeros, kinds))
    end = lax.while_loop(lambda carry: carry.again, body, first)
    return end.last, end.tried - 1


def _overflow() -> Seen:
    return Seen(finite=jnp.bool_(False), loss_finite=jnp.bool_(True))
