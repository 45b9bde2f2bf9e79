"""An equinox GPT that learns to write Python, in FP16: micro-batches are added up, clipped once, and share a scale."""

import argparse
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradscale.jax import Scaler, apply
from gradscale.jax.casting import get_policy

STEPS, MICRO_BATCHES, SEQUENCES, LENGTH, WIDTH = 100, 4, 8, 32, 48

text = np.frombuffer(inspect.getsource(argparse).encode("ascii", "ignore"), np.uint8)
causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


class GPT(eqx.Module):
    characters: jax.Array
    positions: jax.Array
    norms: list
    attention: eqx.nn.MultiheadAttention
    layers: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.characters = 0.1 * jax.random.normal(keys[0], (128, WIDTH))
        self.positions = 0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(3)]
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[2])
        self.layers = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[3])

    def __call__(self, row):
        before, between, after = map(jax.vmap, self.norms)
        x = self.characters[row] + self.positions
        x = x + self.attention(before(x), before(x), before(x), causal)
        return after(x + jax.vmap(self.layers)(between(x))) @ self.characters.T


params, static = eqx.partition(GPT(jax.random.key(0)), eqx.is_inexact_array)
precision = get_policy("params=f32,compute=f16,output=f32")  # cast inside, so that gradients come out as float32
tx = optax.adam(5e-3)
opt_state, scaler = tx.init(params), Scaler()


@jax.jit
def step(scaler, params, opt_state, micro_batches):
    def scaled_loss(params, rows):
        logits = jax.vmap(precision.wrap(eqx.combine(params, static)))(rows[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean() / MICRO_BATCHES
        return scaler.scale(loss), loss

    def add(total, rows):
        grads, loss = jax.grad(scaled_loss, has_aux=True)(params, rows)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro_batches)
    # The scale moves here and nowhere else, so these gradients could be added up: all were made with the same one.
    grads, scaler, result = scaler.step(grads, losses, clip_norm=1.0)
    params, opt_state = apply(tx, grads, opt_state, params, result)
    return scaler, params, opt_state, losses.sum()


losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    starts = rng.integers(len(text) - LENGTH, size=(MICRO_BATCHES, SEQUENCES, 1))
    scaler, params, opt_state, loss = step(scaler, params, opt_state, text[starts + np.arange(LENGTH + 1)])
    losses.append(loss)

metrics = scaler.metrics()
print(f"loss {losses[0]:.3f} -> {jnp.stack(losses[-10:]).mean():.3f}", end=", ")
print(f"skipped {metrics['skipped']} of {STEPS} steps, scale {metrics['scale']:g}")
