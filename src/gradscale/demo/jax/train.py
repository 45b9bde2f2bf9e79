"""One training step: how `gradscale.jax` is used."""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from gradscale.demo.jax.gpt import Params, init_taps
from gradscale.demo.jax.language import FULL, init_params, loss_of
from gradscale.demo.run import Gradients, Step
from gradscale.demo.text import AHEAD_WEIGHT, LEARNING_RATE, Text, gpt_scores
from gradscale.demo.train import Recipe
from gradscale.formats import FP16, FP32
from gradscale.jax import Scaler, apply, value_and_grad
from gradscale.jax.casting import Policy as Precision
from gradscale.jax.casting import get_policy

OPTIMIZER = optax.adam(LEARNING_RATE)
PRECISIONS = {FP32: FULL, FP16: get_policy("params=f32,compute=f16,output=f32")}


@partial(jax.jit, static_argnames="precision", donate_argnames=("opt_state",))
def train_step(scaler: Scaler, params: Params, opt_state: Any, batch: Any, precision: Precision) -> Any:
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
