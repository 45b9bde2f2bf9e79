"""A small network whose FP16 gradients overflow on demand, and steps that train it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradscale import Dynamic, Static
from gradscale.jax import Scaler, StepResult, apply, value_and_grad

Params = dict[str, Any]

INF, NAN = float("inf"), float("nan")

POLICY = Dynamic(init_scale=1024.0, growth_interval=3)

EXACT = Static(2.0**10)


def params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (4, 8), "out": (8, 2)}
    return {name: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}


def batch(seed: int = 0, size: int = 8, boost: float = 1.0) -> Any:
    """Returns inputs. A `boost` of 1e4 lets the FP16 gradients of `hidden` overflow at any scale above a few."""
    return jnp.asarray(np.random.default_rng(100 + seed).normal(0, boost, (size, 4)), jnp.float32)


def outputs(weights: Params, x: Any) -> Any:
    """Returns what the network puts out, computed in FP16.

    Inside one fused operation FP16 numbers may go out of range and come back; a matrix product lets none do so.
    """
    hidden = x.astype(jnp.float16) @ weights["hidden"].astype(jnp.float16)
    return (jnp.tanh(hidden) @ weights["out"].astype(jnp.float16)).astype(jnp.float32)


def loss_of(weights: Params, x: Any) -> Any:
    return jnp.mean(jnp.square(outputs(weights, x) - 1.0))


def base_loss(weights: Params, x: Any) -> Any:
    """Returns the loss in float32 throughout: gradients that are exact whatever the scale."""
    return jnp.mean(jnp.square(jnp.tanh(x @ weights["hidden"]) @ weights["out"] - 1.0))


def spiked(weights: Params, x: Any, spike: Any) -> Any:
    """Returns a loss whose gradients get `spike` times a sum over the weights added: inf and NaN on demand."""
    spike = jnp.asarray(spike)
    # The sum differs from device to device where the spike does, as a backward rule of one's own must declare.
    return base_loss(weights, x) + _spike(weights["out"] + jnp.zeros_like(spike), spike)


@jax.custom_vjp
def _spike(weight: Any, spike: Any) -> Any:
    return jnp.float32(0)


def _spike_forward(weight: Any, spike: Any) -> Any:
    return jnp.float32(0), (weight, spike)


def _spike_backward(saved: Any, cotangent: Any) -> Any:
    weight, spike = saved
    return jnp.zeros_like(weight).at[0, 0].set(spike * cotangent), jnp.zeros_like(spike)


_spike.defvjp(_spike_forward, _spike_backward)


def trainer(
    tx: optax.GradientTransformation, loss: Callable[..., Any] = spiked, **options: Any
) -> Callable[..., tuple[Any, Any, Scaler, StepResult]]:
    """Returns a compiled step: (params, opt_state, scaler, *args) -> params, opt_state, scaler, result."""
    gradient = value_and_grad(loss, **options)

    @jax.jit
    def step(weights: Any, opt_state: Any, scaler: Scaler, *args: Any) -> tuple[Any, Any, Scaler, StepResult]:
        _, grads, scaler, result = gradient(scaler, weights, *args)
        weights, opt_state = apply(tx, grads, opt_state, weights, result)
        return weights, opt_state, scaler, result

    return step


def same(left: Any, right: Any) -> bool:
    """Returns whether two pytrees have the same structure, types and bits."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    equal = all(
        np.asarray(a).dtype == np.asarray(b).dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )
    return equal and jax.tree.structure(left) == jax.tree.structure(right)


def number(value: Any) -> float:
    """Returns an array without dimensions, which must be there, as a Python number."""
    return float(value)


def programs(function: Any) -> int:
    """Returns how many programs were compiled for a jitted function."""
    return function._cache_size()
