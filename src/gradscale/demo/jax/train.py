"""The training loop: one way to train the model, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from gradscale.demo.jax.gpt import Params, init_taps
from gradscale.demo.jax.language import Text, init_params, loss_of, scores
from gradscale.demo.run import SAMPLE_EVERY, Run
from gradscale.histogram import exponent_histogram
from gradscale.jax import Scaler, apply, value_and_grad
from gradscale.jax.casting import Policy as Precision
from gradscale.policies.contract import Policy

OPTIMIZER = optax.adam(4e-3)


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: what the table and the plot call it.
        policy: the rule for the scale.
        precision: the types of parameters and arithmetic.
    """

    name: str
    policy: Policy
    precision: Precision


@partial(jax.jit, static_argnames="precision", donate_argnames=("opt_state",))
def train_step(scaler: Scaler, params: Params, opt_state: Any, batch: Any, precision: Precision) -> Any:
    """Returns everything the next step needs, the loss that is shown, the gradients and the result."""
    loss = partial(loss_of, precision=precision)
    (_, shown), grads, scaler, result = value_and_grad(loss, has_aux=True)(scaler, params, batch)
    params, opt_state = apply(OPTIMIZER, grads, opt_state, params, result)
    return scaler, params, opt_state, shown, grads, result


def train(way: Way, text: Text, seed: int, steps: int, tick: Callable[[], None]) -> Run:
    """Returns the run. The same seed gives every way the same start and the same batches.

    Args:
        way: how to train.
        text: the data.
        seed: of the start and the batches.
        steps: how many.
        tick: called after each.
    """
    rng = np.random.default_rng(seed)
    params = init_params(seed)
    opt_state = OPTIMIZER.init(params)
    scaler = Scaler(way.policy)
    run = Run(way.name)
    for step in range(steps):
        batch, before = text.batch(rng), params
        scaler, params, opt_state, shown, grads, result = train_step(scaler, params, opt_state, batch, way.precision)
        if step % SAMPLE_EVERY == 0:
            _sample(run, step, before, batch, grads)
        if result.skipped():
            run.skipped.append(step)
        run.losses.append(float(shown))
        run.scales.append(float(result.scale))
        tick()
    run.scores = scores(params, text.test_rows())
    return run


def _sample(run: Run, step: int, params: Params, batch: Any, grads: Params) -> None:
    """Compares the gradients with those that FP32 makes of the same weights and batch."""
    taps = init_taps(params["trunk"], batch[:, :-2])
    true_grads, activation_grads = jax.tree.map(np.asarray, _true_grads(params, taps, batch))
    pairs = list(zip(jax.tree.leaves(true_grads), map(np.asarray, jax.tree.leaves(grads)), strict=True))
    nonzero = sum(int(np.count_nonzero(true)) for true, _ in pairs)
    lost = sum(int(np.count_nonzero((true != 0) & (kept == 0))) for true, kept in pairs)
    run.sampled.append(step)
    run.lost.append(lost / max(1, nonzero))
    run.histogram = run.histogram + exponent_histogram(jax.tree.leaves([true_grads, activation_grads]))


@jax.jit
def _true_grads(params: Params, taps: Any, batch: Any) -> Any:
    """Returns the gradients of parameters and activations in FP32."""
    return jax.grad(lambda params, taps: loss_of(params, batch, taps=taps)[0], argnums=(0, 1))(params, taps)
