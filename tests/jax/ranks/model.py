"""A network whose gradients are exact in float32 however they are summed, its data, and faults on single devices.

Inputs and targets are -1, 0 or 1. The forward pass rounds weights to halves between -1 and 1, so that a gradient is a
multiple of 1/16 of at most 16, and the sum of all squares fits 24 bits. Momentum is 1 and the learning rate a power of
two: weights and optimizer state are exact too, unless gradients are clipped by a norm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradscale import Dynamic

INF, NAN = float("inf"), float("nan")

POLICY = Dynamic(init_scale=2.0**16, growth_interval=3)

DEVICES = 4
ROWS, INPUTS, HIDDEN, OUTPUTS = 8, 4, 8, 4


class Batch(NamedTuple):
    """The data of one step: rows, and what goes wrong on each device.

    Attributes:
        x: inputs.
        y: targets.
        bad_losses: what is added to the loss of each device.
        bad_grads: what is added to a gradient of each device, times the scale.
    """

    x: Any
    y: Any
    bad_losses: Any
    bad_grads: Any


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"into": (INPUTS, HIDDEN), "out": (HIDDEN, OUTPUTS), "bias": (OUTPUTS,)}
    return {name: rng.choice([-0.5, 0.0, 0.5], shape).astype(np.float32) for name, shape in shapes.items()}


def optimizer(clip_value: float | None) -> optax.GradientTransformation:
    """Returns SGD that adds up all gradients, each element of which is clipped first if `clip_value` is given."""
    sgd = optax.sgd(0.125, momentum=1.0)
    return sgd if clip_value is None else optax.chain(optax.clip(clip_value), sgd)


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Returns the data of a run. In about every third step one device has a fault: in its loss, or in its gradient."""
    rng = np.random.default_rng(seed)
    made = []
    for step in range(count):
        rows = [rng.integers(-1, 2, (ROWS, width)).astype(np.float32) for width in (INPUTS, OUTPUTS)]
        faults = np.zeros((2, DEVICES), np.float32)
        # The first four steps are one of each kind, so that a short run has them all.
        if (step < 8 and step % 2) or (step >= 8 and rng.random() < 0.3):
            kind, bad = divmod(step // 2 % 4, 2)
            faults[kind, rng.integers(DEVICES)] = (INF, NAN)[bad]
        made.append(Batch(*rows, *faults))
    return made


def _same(value: Any) -> Any:
    return value


def outputs(weights: dict[str, Any], x: Any, total: Any = _same) -> Any:
    """Returns the outputs. `total` adds up those of devices that hold a part of the hidden layer each."""
    hidden = jax.nn.relu(x @ _halves(weights["into"]))
    return total(hidden @ _halves(weights["out"])) + _halves(weights["bias"])


def cost(
    weights: dict[str, Any], x: Any, y: Any, bad_loss: Any, bad_grad: Any, total: Any = lambda value: value
) -> Any:
    """Returns the mean over rows of outputs times targets, plus the faults of a device."""
    bad_grad = jnp.asarray(bad_grad)
    # The sum differs from device to device where the fault does, as a backward rule of one's own must declare.
    fault = _fault(weights["out"] + jnp.zeros_like(bad_grad), bad_grad)
    return jnp.mean(jnp.sum(outputs(weights, x, total) * y, axis=-1)) + bad_loss + fault


def alone(weights: dict[str, Any], batch: Batch) -> Any:
    """Returns the loss of one device that has all rows, and the faults of all."""
    return cost(weights, batch.x, batch.y, jnp.sum(batch.bad_losses), jnp.sum(batch.bad_grads))


def _halves(weight: Any) -> Any:
    """Returns the weight rounded, with the gradient of the weight itself."""
    return weight + jax.lax.stop_gradient(jnp.clip(jnp.round(weight * 2) / 2, -1, 1) - weight)


@jax.custom_vjp
def _fault(weight: Any, bad: Any) -> Any:
    return jnp.float32(0)


def _fault_forward(weight: Any, bad: Any) -> Any:
    return jnp.float32(0), (weight, bad)


def _fault_backward(saved: Any, cotangent: Any) -> Any:
    weight, bad = saved
    # Not `.at[0, 0].set`: where `jit` shards the array, XLA (JAX 0.10.2 on a CPU) then puts a zero into an element of
    # each shard of the whole gradient, without gradscale too.
    return jnp.zeros_like(weight) + bad * cotangent, jnp.zeros_like(bad)


_fault.defvjp(_fault_forward, _fault_backward)
