"""The demo in JAX: a GPT with two heads, float32 weights and FP16 arithmetic, one compiled step.

The GPT is in the style of GPT-2, in plain JAX: a function of parameters, which are dicts of arrays.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples.demo.data import (
    AHEAD_WEIGHT,
    DEPTH,
    HEADS,
    LANGUAGE,
    LENGTH,
    TEXT_LEARNING_RATE,
    VOCABULARY,
    WIDTH,
    Text,
    gpt_scores,
    load_text,
)
from examples.demo.loop import RECIPES, Demo, Experiment, Recipe
from examples.demo.runs import Gradients, Step
from jax import Array

from gradscale import FP16, FP32
from gradscale.jax import Scaler, apply, value_and_grad
from gradscale.jax.casting import Policy, get_policy

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


OPTIMIZER = optax.adam(TEXT_LEARNING_RATE)
PRECISIONS = {FP32: FULL, FP16: get_policy("params=f32,compute=f16,output=f32")}


@partial(jax.jit, static_argnames="precision", donate_argnames=("opt_state",))
def train_step(scaler: Scaler, params: Params, opt_state: Any, batch: Any, precision: Policy) -> Any:
    """Returns the new scaler, parameters and optimizer state, the second head's loss, the gradients and the result."""
    loss = partial(loss_of, precision=precision)
    (_, shown), grads, scaler, result = value_and_grad(loss, has_aux=True)(scaler, params, batch)
    params, opt_state = apply(OPTIMIZER, grads, opt_state, params, result)
    return scaler, params, opt_state, shown, grads, result


@jax.jit
def _reference_grads(params: Params, taps: Any, batch: Any) -> Any:
    """Returns the gradients of parameters and activations in FP32."""
    return jax.grad(lambda params, taps: loss_of(params, batch, taps=taps)[0], argnums=(0, 1))(params, taps)


class JaxTrainer:
    """Trains the GPT."""

    def __init__(self, text: Text, seed: int, recipe: Recipe) -> None:
        self._text = text
        self._rng = np.random.default_rng(seed)
        self._params = init_params(seed)
        self._opt_state = OPTIMIZER.init(self._params)
        self._scaler = Scaler(recipe.policy)
        self._precision = PRECISIONS[recipe.format]

    def step(self, sample: bool) -> Step:
        batch, before = self._text.batch(self._rng.integers), self._params
        self._scaler, self._params, self._opt_state, shown, grads, result = train_step(
            self._scaler, before, self._opt_state, batch, self._precision
        )
        sampled = None
        if sample:
            taps = init_taps(before["trunk"], batch[:, :-2])
            trees = (grads, *_reference_grads(before, taps, batch))
            sampled = Gradients(*([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees))
        return Step(float(shown), float(result.scale), bool(result.skipped()), sampled)

    def scores(self) -> dict[str, float]:
        loss, ahead = map(float, jax.jit(loss_of)(self._params, self._text.test_rows()))
        return gpt_scores(loss - AHEAD_WEIGHT * ahead, ahead)


DEMO = Demo(
    RECIPES,
    [Experiment(LANGUAGE, 300, lambda seed: partial(JaxTrainer, load_text(), seed), 45.0)],
)
