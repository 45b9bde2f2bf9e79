"""A small GPT in the style of GPT-2, in plain JAX: a function of parameters, which are dicts of arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Params = dict[str, Any]

INIT_STD = 0.02


def init_gpt(key: Array, vocabulary: int, length: int, width: int, depth: int) -> Params:
    """Returns the parameters. Those of the blocks are stacked: they run in a loop that is compiled once."""
    characters, positions, blocks = jax.random.split(key, 3)
    return {
        "characters": normal(characters, (vocabulary, width)),
        "positions": normal(positions, (length, width)),
        "blocks": jax.vmap(partial(_init_block, width=width))(jax.random.split(blocks, depth)),
        "norm": _init_norm(width),
    }


def normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns small random numbers."""
    return INIT_STD * jax.random.normal(key, shape)


def _init_block(key: Array, width: int) -> Params:
    shapes = {"joined": (width, 3 * width), "mixed": (width, width)}
    shapes |= {"widened": (width, 4 * width), "narrowed": (4 * width, width)}
    keys = jax.random.split(key, len(shapes))
    return {
        "linear": {
            name: {"w": normal(own, shape), "b": jnp.zeros(shape[1])}
            for own, (name, shape) in zip(keys, shapes.items(), strict=True)
        },
        "before_attention": _init_norm(width),
        "before_layers": _init_norm(width),
    }


def _init_norm(width: int) -> Params:
    return {"w": jnp.ones(width), "b": jnp.zeros(width)}


def init_taps(params: Params, text: Any) -> Params:
    """Returns zeros for `gpt` to add to the inputs and outputs of its layers.

    The gradients with respect to these zeros are those of the activations, which FP16 must hold as well.
    """

    def zeros(depth: int, size: int) -> Any:
        return np.zeros((depth, *text.shape, size), np.float32)

    shapes = {name: layer["w"].shape for name, layer in params["blocks"]["linear"].items()}
    return {name: {"into": zeros(depth, into), "out": zeros(depth, out)} for name, (depth, into, out) in shapes.items()}


def gpt(params: Params, taps: Params, text: Array, heads: int) -> Array:
    """Returns a feature vector for each position of a text."""

    def run(x: Array, stacked: tuple[Params, Params]) -> tuple[Array, None]:
        block, tap = stacked
        linear = partial(_linear, block["linear"], tap)
        x = x + _attention(linear, _norm(block["before_attention"], x), heads)
        return x + linear("narrowed", jax.nn.gelu(linear("widened", _norm(block["before_layers"], x)))), None

    x = params["characters"][text] + params["positions"][: text.shape[1]]
    x, _ = jax.lax.scan(run, x, (params["blocks"], taps))
    return _norm(params["norm"], x)


def _attention(linear: Any, x: Array, heads: int) -> Array:
    """Returns causal self-attention. The softmax is computed in float32."""
    queries, keys, values = jnp.split(linear("joined", x).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
    logits = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / queries.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)).astype(x.dtype)
    return linear("mixed", jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(x.shape))


def _linear(layers: Params, tap: Params, name: str, x: Array) -> Array:
    return (x + tap[name]["into"]) @ layers[name]["w"] + layers[name]["b"] + tap[name]["out"]


def _norm(params: Params, x: Array) -> Array:
    """Returns `x` with mean 0 and deviation 1, times `w`, plus `b`. Squares are taken in float32."""
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * params["w"] + params["b"]
