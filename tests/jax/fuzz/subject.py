"""The same program run by `gradscale.jax`."""

import functools
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.jax.fuzz.program import STEPS, Feed, Setup
from tests.jax.fuzz.reference import GROWTH_INTERVAL, HYSTERESIS, INIT_SCALE, plain_optimizer

from gradscale import Dynamic, Headroom, NoScaling, Static
from gradscale.jax import Scaler, apply, init, loss_scale, scaled, value_and_grad
from gradscale.jax.transformation import ScaledState

POLICIES: dict[str, Any] = {
    "static": Static(INIT_SCALE),
    "dynamic": Dynamic(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL),
    "hysteresis": Dynamic(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL, hysteresis=HYSTERESIS),
    "headroom": Headroom(),
    "none": NoScaling(),
}


def run(setup: Setup, feed: Feed) -> tuple[list[bool], list[float], Any]:
    """Returns for each step whether it was applied, the scale after it, and the weights at the end."""
    start, step = compiled(setup)
    params = jax.tree.map(jnp.asarray, feed.weights)
    state = start(params)
    arguments = [
        jax.tree.map(lambda *each: jnp.asarray(np.stack(each)), *feed.batches[number]) for number in range(STEPS)
    ]
    arguments = list(zip(arguments, map(jnp.float32, feed.spikes), map(jnp.float32, feed.bad_losses), strict=True))
    if setup.mode == "scan":
        (params, _), (applied, scales) = step((params, state), jax.tree.map(lambda *each: jnp.stack(each), *arguments))
        return applied.tolist(), scales.tolist(), params
    seen = []
    for number, argument in enumerate(arguments):
        if number in feed.reloads:
            params, state = _reloaded(params, state)
        (params, state), found = step((params, state), argument)
        seen.append(found)
    applied, scales = zip(*seen, strict=True)
    return list(map(bool, applied)), list(map(float, scales)), params


@functools.cache
def compiled(setup: Setup) -> tuple[Any, Any]:
    """Returns what makes the state, and one step, or all of them with `scan`: (params, state), batch -> the same."""
    tx = transformation(setup)
    policy = POLICIES[setup.policy]
    outside = scaled(tx, policy, setup.clip_norm, wide_state=setup.wide_state)

    def start(params: Any) -> Any:
        return outside.init(params) if setup.way == "scaled" else (init(tx, params), Scaler(policy))

    def step(carry: Any, argument: Any) -> Any:
        params, state = carry
        run_step = {"value_and_grad": by_value_and_grad, "step": by_hand, "scaled": by_scaled}[setup.way]
        return run_step(setup, outside if setup.way == "scaled" else tx, params, state, argument)

    if setup.mode == "scan":
        return start, jax.jit(lambda carry, arguments: jax.lax.scan(step, carry, arguments))
    return start, jax.jit(step) if setup.mode == "jit" else step


def by_value_and_grad(setup: Setup, tx: Any, params: Any, state: Any, argument: Any) -> Any:
    opt_state, scaler = state
    gradient = value_and_grad(loss_of, clip_norm=setup.clip_norm, retries=setup.retries)
    _, grads, scaler, result = gradient(scaler, params, *jax.tree.map(lambda leaf: leaf[0], argument))
    params, opt_state = apply(tx, grads, opt_state, params, result, gate=setup.gate)
    return (params, (opt_state, scaler)), (result.applied, scaler.loss_scale)


def by_hand(setup: Setup, tx: Any, params: Any, state: Any, argument: Any) -> Any:
    opt_state, scaler = state
    total, losses = jax.tree.map(jnp.zeros_like, params), []
    for number in range(setup.micro):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], argument)
        grads, loss = jax.grad(_scaled_loss, has_aux=True)(params, scaler.loss_scale, *one)
        total, losses = jax.tree.map(jnp.add, total, grads), [*losses, loss]
    grads, scaler, result = scaler.step(total, losses, clip_norm=setup.clip_norm)
    params, opt_state = apply(tx, grads, opt_state, params, result, gate=setup.gate)
    return (params, (opt_state, scaler)), (result.applied, scaler.loss_scale)


def by_scaled(setup: Setup, tx: Any, params: Any, state: Any, argument: Any) -> Any:
    one = jax.tree.map(lambda leaf: leaf[0], argument)
    grads, loss = jax.grad(_scaled_loss, has_aux=True)(params, loss_scale(state), *one)
    before = state.scaler.state.applied
    updates, state = tx.update(grads, state, params, loss=loss)
    params = optax.apply_updates(params, updates)
    return (params, state), (state.scaler.state.applied > before, loss_scale(state))


def transformation(setup: Setup) -> Any:
    """Returns the optimizer, with what is around it."""
    tx = plain_optimizer(setup.optimizer)
    if "frozen" in setup.leaves:
        labels = {name: "freeze" if name == "frozen" else "train" for name in setup.leaves}
        tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
    return optax.MultiSteps(tx, setup.every).gradient_transformation() if setup.every > 1 else tx


def loss_of(params: Any, batch: Any, spike: Any, bad_loss: Any) -> Any:
    """Returns a loss whose gradients are `batch`, with `spike` added to the first of them."""
    pairs = [(params[name], batch[name]) for name in params if name != "count"]
    products = [jnp.sum(jnp.real(weight * x).astype(jnp.float32)) for weight, x in pairs]
    return sum(products) + _spike(params["a"], spike) + bad_loss


def _scaled_loss(params: Any, scale: Any, *argument: Any) -> Any:
    loss = loss_of(params, *argument)
    return loss * scale, loss


@jax.custom_vjp
def _spike(weight: Any, spike: Any) -> Any:
    return jnp.float32(0)


def _backward(saved: Any, cotangent: Any) -> Any:
    weight, spike = saved
    return jnp.zeros_like(weight).at[0].set(spike * cotangent), jnp.zeros_like(spike)


_spike.defvjp(lambda weight, spike: (jnp.float32(0), (weight, spike)), _backward)


def _reloaded(params: Any, state: Any) -> Any:
    """Returns everything after it was saved and loaded."""

    def through_json(scaler: Scaler) -> Scaler:
        return Scaler.from_dict(json.loads(json.dumps(scaler.to_dict())))

    params, state = pickle.loads(pickle.dumps((params, state)))
    if isinstance(state, ScaledState):
        return params, state._replace(scaler=through_json(state.scaler))
    return params, (state[0], through_json(state[1]))
