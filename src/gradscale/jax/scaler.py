"""`Scaler`: a policy and its present state, as a value that goes through every JAX transformation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from gradscale.engine.saved import check_state, read_saved, write_saved
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, check_stuck
from gradscale.jax.agree import AxisNames
from gradscale.jax.checks import checked_loss, static_policy
from gradscale.jax.result import StepResult
from gradscale.jax.saved import register_with_flax
from gradscale.jax.step import Asked, attempt, finish
from gradscale.jax.tree import as_pytree, register, split
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling
from gradscale.record import with_values

DEFAULT_POLICY = Dynamic()


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, init=False)
class Scaler:
    """A scale and the rule that moves it. A value: `value_and_grad` and `step` return the next one.

    It is a pytree. The state's numbers are its leaves, each an array of its own, so that they can be donated; the
    policy is static. So it goes through `jit`, `vmap`, `scan`, `shard_map` and checkpoints like any other state of a
    training loop.

    >>> scaler = Scaler(Dynamic(init_scale=1024.0))
    >>> float(scaler.loss_scale)
    1024.0
    >>> len(jax.tree.leaves(scaler))
    7

    Attributes:
        policy: the rule for the scale.
        state: everything the scale remembers: its value, and the counters.
    """

    policy: Policy
    state: Any

    def __init__(self, policy: Policy | Literal["auto"] = DEFAULT_POLICY, state: ScaleState | None = None) -> None:
        """Makes the scaler of the first step.

        Args:
            policy: the rule for the scale. `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
            state: where to go on, as `gradscale.import_state` returns it; by default the policy's start.

        Raises:
            TypeError: `policy` is not a policy that can be compared and hashed, or `state` is not one of its states.
            ValueError: `state` holds vectors. For many scales at once use `jax.vmap`.
        """
        rule = static_policy(policy)
        start = rule.start() if state is None else state
        check_state(rule, start)
        register_with_flax(Scaler)
        object.__setattr__(self, "policy", rule)
        object.__setattr__(self, "state", as_pytree(start))

    @property
    def loss_scale(self) -> Array:
        """What the next loss is to be multiplied by: a float32 array on the device."""
        return self.state.scale

    def scale(self, loss: Any) -> Any:
        """Returns `loss`, or every loss of a pytree, times the scale, in float32 or wider.

        For gradients taken by hand. Take them of what this returns, and give them to `step`.
        """
        return jax.tree.map(lambda one: checked_loss(one, self.policy) * self.loss_scale, loss)

    def step(
        self,
        grads: Any,
        loss: Any = None,
        *,
        clip_norm: float | None = None,
        norm: bool = False,
        axis_names: AxisNames = None,
    ) -> tuple[Any, "Scaler", StepResult]:
        """Returns scaled gradients unscaled and clipped, the scaler of the next step, and the result.

        What `value_and_grad` does once it has the gradients. They come back in float32 or wider; as zeros if one of
        them, or the loss, was inf or NaN. Does not wait for the device.

        Args:
            grads: a pytree of gradients of a loss that was multiplied by the scale.
            loss: the true loss, or a pytree of losses. One that is not finite skips the step and leaves the scale
                alone: no scale could have helped.
            clip_norm: bound on the norm of all gradients together, in true units.
            norm: measure the norm for the result even if nothing is clipped.
            axis_names: mapped axes to agree over. By default all axes of `shard_map` and `pmap`.
        """
        asked = Asked(clip_norm, norm, axis_names)
        parts = split(grads, "grads")
        finite = [jnp.all(jnp.isfinite(checked_loss(one, NoScaling()))) for one in jax.tree.leaves(loss)]
        moving = [jnp.asarray(leaf) for leaf in parts.moving]
        last = attempt(self.policy, self.state, moving, jnp.all(jnp.stack([jnp.bool_(True), *finite])), asked)
        gradients, state, result = finish(self.policy, self.state, last, parts.names, asked)
        return parts.gradients(gradients), self.moved(state), result

    def moved(self, state: Any) -> "Scaler":
        """Returns the scaler of the same policy with another state, unchecked."""
        return self.tree_unflatten(self.policy, (state,))

    def metrics(self) -> dict[str, Array]:
        """Returns scale, counts and skip rate as arrays on the device. Does not wait for it."""
        applied, skipped = self.state.applied, self.state.skipped
        steps = jnp.maximum(applied + skipped, 1).astype(jnp.float32)
        return {"scale": self.loss_scale, "applied": applied, "skipped": skipped, "skip_rate": skipped / steps}

    def check(self, result: StepResult, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS) -> None:
        """Raises if the run is stuck: step after step was skipped, and no lower scale is left to try.

        A compiled step cannot raise. Call this outside of it, now and then: it waits for the device.

        Args:
            result: what the last step returned beside this scaler.
            max_consecutive_skips: skipped steps in a row before the run is stuck.

        Raises:
            ScaleStuck: the run is stuck. It names the parameters to blame, and the likely cause.
        """
        check_stuck(self.state, max_consecutive_skips, result, len(result.names))

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as plain values that go through JSON. Waits for the device."""
        return write_saved(self.policy, self.state)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Returns the scaler that `to_dict` wrote: all it takes to go on bit for bit.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a key is missing or unknown, or a value is out of range.
        """
        return cls(*read_saved(mapping))

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Takes what pickle wrote, perhaps into a process that has made no scaler yet and whose JAX knows no states."""
        register(type(attributes["state"]))
        self.__dict__.update(attributes)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Policy]:
        """Returns the state as the only child, and the policy as what is static. JAX calls this."""
        return ((jax.tree_util.GetAttrKey("state"), self.state),), self.policy

    @classmethod
    def tree_unflatten(cls, policy: Policy, children: tuple[Any]) -> Self:
        """Returns a scaler of what JAX puts into it, arrays or not, unchecked. JAX calls this."""
        return with_values(object.__new__(cls), {"policy": policy, "state": children[0]})
