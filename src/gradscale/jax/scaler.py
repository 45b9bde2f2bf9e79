"""`Scaler`: a policy and its present state, as a value that goes through every JAX transformation."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscale._text import scaler_text
from gradscale.engine.decide import check_clip
from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, StuckCheck
from gradscale.engine.hints import OtherNames, explains_arguments
from gradscale.engine.metrics import metrics_of
from gradscale.engine.result import ScaleDesync
from gradscale.engine.saved import check_state, policy_from_dict, read_saved, write_saved
from gradscale.jax.axes import AxisNames
from gradscale.jax.forward import checked_loss
from gradscale.jax.remember import StepResult, weights_of
from gradscale.jax.step import Step
from gradscale.jax.tree import Gradients, Leaf, as_pytree, register, split
from gradscale.kernels.jax import shown
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling
from gradscale.record import OTHER_KEYS, numbers, settings_text, with_values


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, init=False, repr=False)
class Scaler(OtherNames):
    """A scale and the rule that changes it. Immutable: `value_and_grad` and `step` return the next one.

    It is a pytree: the numbers of the state are its leaves, and the policy is static. It can be passed through `jit`,
    `vmap`, `scan`, `shard_map` and checkpoints like any other state of a training loop, and donated.

    >>> from gradscale import Dynamic
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

    _adapter: ClassVar[str] = "jax"

    @explains_arguments("Scaler({})")
    def __init__(self, policy: Policy | str = "auto", state: ScaleState | None = None) -> None:
        """Makes the scaler of the first step.

        Args:
            policy: the rule for the scale, or its name as on the command line, such as `"dynamic:growth_interval=100"`.
                `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
            state: where to continue, as `gradscale.import_state` returns it; by default the policy's start.

        Raises:
            TypeError: `policy` is not a policy that can be compared and hashed, or `state` is not one of its states.
            ValueError: `state` holds vectors. For many scales at once use `jax.vmap`.
        """
        rule = static_policy(policy)
        start = rule.start() if state is None else state
        check_state(rule, start)
        _register_with_flax()
        object.__setattr__(self, "policy", rule)
        object.__setattr__(self, "state", as_pytree(start))

    def __repr__(self) -> str:
        """Returns policy, scale and counts as text. Never synchronizes: what is on a device is not read."""
        return scaler_text("Scaler", [settings_text(self.policy)], self.state, None, shown)

    @property
    def loss_scale(self) -> Array:
        """What the next loss is multiplied by: a float32 array on the device."""
        return self.state.scale

    def scale(self, loss: Any) -> Any:
        """Returns `loss`, or every loss of a pytree, times the scale, in float32 or wider.

        For gradients taken by hand. Take them of what this returns, and give them to `step`.
        """
        return jax.tree.map(lambda one: checked_loss(one, self.policy) * self.loss_scale, loss)

    @explains_arguments("scaler.step")
    def step(
        self,
        grads: Any,
        loss: Any = None,
        *,
        clip_norm: float | None = None,
        norm: bool = False,
        axis_names: AxisNames = None,
        specs: Any = None,
    ) -> tuple[Any, "Scaler", StepResult]:
        """Returns scaled gradients unscaled and clipped, the scaler of the next step, and the result.

        The second half of `value_and_grad`. Gradients are returned in float32 or wider; as zeros if one of them, or
        the loss, was inf or NaN. Leaves in flax's collection `_overwrite_with_gradient` are returned as they are, and
        `apply` keeps the present ones if the step is skipped. Does not synchronize with the device.

        Args:
            grads: a pytree of gradients of a loss that was multiplied by the scale.
            loss: the unscaled loss, or a pytree of losses. One that is not finite skips the step and leaves the scale
                alone: no scale could have helped.
            clip_norm: bound on the norm of all gradients together, unscaled.
            norm: measure the norm for the result even if nothing is clipped.
            axis_names: mapped axes to agree over. By default all axes of `shard_map` and `pmap`.
            specs: the `PartitionSpec` of the gradients, or a pytree of them, as in `in_specs`. Needed for the norm
                and for `Histogram` under `pmap` and with `check_vma=False`.
        """
        check_clip("clip_norm", clip_norm)
        parts = split(grads, "grads")
        step = Step.of(self.policy, clip_norm, norm, parts, axis_names, (), specs)
        step.axes.check_scale(self.loss_scale, parts.of(Leaf.TRAINED))
        finite = [jnp.all(jnp.isfinite(checked_loss(one, NoScaling()))) for one in jax.tree.leaves(loss)]
        gradients = Gradients(*(tuple(map(jnp.asarray, leaves)) for leaves in parts.differentiable))
        last = step.attempt(self.state, gradients, jnp.all(jnp.stack([jnp.bool_(True), *finite])))
        unscaled, state, result = step.finish(self.state, last, parts.names)
        return parts.gradients(unscaled), self.with_state(state), result

    def with_state(self, state: Any) -> "Scaler":
        """Returns the scaler of the same policy with another state, unchecked."""
        return self.tree_unflatten(self.policy, (state,))

    def metrics(self, result: StepResult | None = None) -> dict[str, Array]:
        """Returns scale, counts, skip rate, gradient norm and headroom as arrays on the device, NaN where not known.

        `headroom_bits` is how often the scale could double before the largest gradient overflows FP16. Does not
        synchronize with the device.

        Args:
            result: the result of the last step. Without it, and where they were not measured, norm and headroom are
                NaN: the norm needs `clip_norm` or `norm=True`, the headroom a policy that needs the largest magnitude.
        """
        grad_norm, amax = (None, None) if result is None else (result.grad_norm, result.amax)
        return metrics_of(self.state, grad_norm, amax, jnp)

    def check(
        self,
        result: StepResult | None = None,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        *,
        params: Any = None,
    ) -> None:
        """Raises if the run is stuck: step after step was skipped, and no lower scale is left to try.

        A compiled step cannot raise. Call this outside it, every few hundred steps: it synchronizes with the device.

        Args:
            result: the result of the last step. Without one, as with `scaled`, that many skips at a scale that could
                still go lower count as those of a loss that is not finite.
            max_consecutive_skips: skipped steps in a row before the run is stuck.
            params: the parameters, which are measured for the report: if they have diverged, the learning rate is too
                high.

        Raises:
            ScaleDesync: devices that share the scale have different ones.
            ScaleStuck: the run is stuck. It names the non-finite parameters, and the likely cause.
            ValueError: this is a stack of scalers, as `pmap` and `vmap` return it.
        """
        state = self.state
        if shape := jnp.shape(state.scale):
            raise ValueError(
                "Call this on one scaler. Received: scalers stacked in the shape "
                f"{shape}, by `vmap` or `pmap`. Take one: `jax.tree.map(lambda leaf: leaf[0], scaler)`."
            )
        _check_replicas(state)
        if result is not None:
            result.skipped()  # raises where the devices found that their scales differ
        loss_finite = bool(state.stuck if result is None else result.loss_finite)
        last = StepResult(applied=False, scale=state.scale, next_scale=state.scale) if result is None else result
        known = dict[str, Any] if params is None else lambda: {"weights": weights_of(params)}
        StuckCheck(max_consecutive_skips).check(state, last, loss_finite, known)

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy and its state as plain values that go through JSON. Synchronizes with the device.

        Raises:
            ScaleDesync: devices that share the scale have different ones.
        """
        _check_replicas(self.state)
        return write_saved(self.policy, self.state)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Returns the scaler that `to_dict` wrote: all it takes to continue bit-exactly.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a key is missing or unknown, or a value is out of range.
        """
        saved = read_saved(mapping, "Scaler", "from_dict", "to_dict")
        return cls(saved.policy, saved.state)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Sets what pickle wrote."""
        # The constructor registers the state as a pytree, and a new process may not have called it yet.
        register(type(attributes["state"]))
        self.__dict__.update(attributes)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Policy]:
        """Returns the state as the only child, and the policy as what is static. JAX calls this."""
        return ((jax.tree_util.GetAttrKey("state"), self.state),), self.policy

    @classmethod
    def tree_unflatten(cls, policy: Policy, children: tuple[Any]) -> Self:
        """Returns a scaler of any leaves, arrays or not, unchecked. JAX calls this."""
        return with_values(object.__new__(cls), {"policy": policy, "state": children[0]})


def static_policy(policy: Policy | str) -> Policy:
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


def _check_replicas(state: Any) -> None:
    """Raises if the copies of the scale on this process's devices differ. Synchronizes with the device.

    JAX takes one copy for all: a `shard_map` with `check_vma=False` returns what differs as if it did not.

    Raises:
        ScaleDesync: they do. It names the devices.
    """
    scale = state.scale
    if not getattr(scale, "is_fully_replicated", False):
        return
    copies = {shard.device: np.asarray(shard.data) for shard in scale.addressable_shards}
    if any((copy != next(iter(copies.values()))).any() for copy in copies.values()):
        shown = ", ".join(f"{copy.tolist():g} on {device}" for device, copy in copies.items())
        raise ScaleDesync(
            f"A scale must be the same on all devices that share it. Received: {shown}. Start all devices from one "
            "scaler, and agree over every axis that they share."
        )


def _register_with_flax() -> None:
    """Registers how flax writes and reads scalers, if the program has loaded flax.

    `flax.serialization.to_bytes` refuses a class that is not registered.
    """
    # Importing flax only for this would take longer than importing JAX.
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None:
        flax.register_serialization_state(Scaler, _to_flax, _from_flax, override=True)


def _to_flax(scaler: Scaler) -> dict[str, Any]:
    """Returns the policy's settings and the arrays of the state, which may be vectors."""
    return {"policy": scaler.policy.to_dict(), "state": numbers(scaler.state)}


def _from_flax(scaler: Scaler, mapping: Mapping[str, Any]) -> Scaler:
    """Returns the scaler that `_to_flax` wrote, with the settings it had then, whatever those of `scaler` are."""
    policy = policy_from_dict(mapping["policy"])
    start = as_pytree(policy.start())
    expected, received = sorted(numbers(start)), sorted(mapping["state"])
    if expected != received:
        raise ValueError(
            f"A state of {type(policy).__name__} has the fields {expected}. Received: {received}. {OTHER_KEYS}"
        )
    return scaler.tree_unflatten(policy, (with_values(start, {k: jnp.array(v) for k, v in mapping["state"].items()}),))
