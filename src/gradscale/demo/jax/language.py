"""The task: a GPT learns to write Python, character by character."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gradscale.demo.jax.gpt import Params, gpt, init_gpt, init_taps, normal
from gradscale.demo.run import Score, Subject
from gradscale.demo.text import VOCABULARY, load_numbers
from gradscale.jax.casting import Policy

PERPLEXITY = Score("perplexity", ".1f")
MAIN_HEAD = Score("main head", ".1f")

SUBJECT = Subject(
    model="gpt",
    loss_title="Loss of the GPT's second head",
    scores=(PERPLEXITY, MAIN_HEAD),
    caption="perplexity, loss: of the second head; main head: its perplexity",
)

AHEAD_WEIGHT = 1e-5
"""Weight of the second head's loss, and the cause of the trouble: the gradient of its logits is at most this over the
512 characters of a batch, 2e-8, and all below 3e-8 is zero in FP16."""

LENGTH = 32
SEQUENCES = 16
TEST_SEQUENCES = 512
WIDTH, HEADS, DEPTH = 32, 4, 2

FULL = Policy(jnp.float32, jnp.float32, jnp.float32)


class Text:
    """Stretches of the text, as rows of numbers."""

    def __init__(self) -> None:
        self._train, self._test = load_numbers()

    def batch(self, rng: np.random.Generator) -> Any:
        """Returns random stretches of the training text, each two characters longer than the model reads."""
        starts = rng.integers(0, len(self._train) - LENGTH - 1, (SEQUENCES, 1))
        return self._train[starts + np.arange(LENGTH + 2)]

    def test_rows(self) -> Any:
        """Returns the beginning of the test text."""
        return self._test[: TEST_SEQUENCES * (LENGTH + 2)].reshape(TEST_SEQUENCES, LENGTH + 2)


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
    """Returns the loss that is trained, and the second head's part of it; both in float32.

    Args:
        params: the parameters.
        batch: rows of characters.
        precision: which types to compute in.
        taps: zeros to add to the activations, if their gradients are wanted.
    """
    text = batch[:, :-2]
    taps = init_taps(params["trunk"], text) if taps is None else taps
    next_logits, ahead_logits = precision.wrap(_logits)(params, taps, text)
    ahead = _cross_entropy(ahead_logits, batch[:, 2:])
    return _cross_entropy(next_logits, batch[:, 1:-1]) + AHEAD_WEIGHT * ahead, ahead


def scores(params: Params, rows: Array) -> dict[str, float]:
    """Returns what the subject's scores are on test data, computed in float32."""
    loss, ahead = map(float, jax.jit(loss_of)(params, rows))
    return {PERPLEXITY.name: math.exp(ahead), MAIN_HEAD.name: math.exp(loss - AHEAD_WEIGHT * ahead)}


def _logits(params: Params, taps: Any, text: Array) -> tuple[Array, Array]:
    features = gpt(params["trunk"], taps, text, HEADS)
    return features @ params["next"], features @ params["ahead"]


def _cross_entropy(logits: Array, characters: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, characters).mean()
