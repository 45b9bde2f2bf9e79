"""A GPT with two heads that learns to write Python, character by character."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gradscale.demo.jax.gpt import Params, gpt, init_gpt, init_taps, normal
from gradscale.demo.text import AHEAD_WEIGHT, DEPTH, HEADS, LENGTH, VOCABULARY, WIDTH
from gradscale.jax.casting import Policy

FULL = Policy(jnp.float32, jnp.float32, jnp.float32)


@jax.jit
def init_params(seed: int) -> Params:
    """Returns the parameters of a GPT with a head for the next character and one for the character after it."""
    trunk, following, ahead = jax.random.split(jax.random.key(seed), 3)
    shape = (WIDTH, len(VOCABULARY))
    return {
        "trunk": init_gpt(trunk, len(VOCABULARY), LENGTH, WIDTH, DEPTH),
        "next": normal(following, shape),
        "ahead": normal(ahead, shape),
    }


def loss_of(params: Params, batch: Array, precision: Policy = FULL, taps: Any = None) -> tuple[Array, Array]:
    """Returns the total loss and the second head's, both in float32. `taps` are zeros to add to the activations."""
    text = batch[:, :-2]
    taps = init_taps(params["trunk"], text) if taps is None else taps
    next_logits, ahead_logits = precision.wrap(_logits)(params, taps, text)
    ahead = _cross_entropy(ahead_logits, batch[:, 2:])
    return _cross_entropy(next_logits, batch[:, 1:-1]) + AHEAD_WEIGHT * ahead, ahead


def _logits(params: Params, taps: Any, text: Array) -> tuple[Array, Array]:
    features = gpt(params["trunk"], taps, text, HEADS)
    return features @ params["next"], features @ params["ahead"]


def _cross_entropy(logits: Array, characters: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, characters).mean()
