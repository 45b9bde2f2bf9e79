"""The demo in JAX: its model, its runs, and the program."""

import numpy as np
import pytest
from examples.demo import data, load_demo
from examples.demo.data import VOCABULARY
from examples.demo.runs import Run
from tests.demo.five_recipes import FiveRecipes, compared

from gradscale.formats import FP16

jax = pytest.importorskip("jax")

from examples.demo.with_jax import (  # noqa: E402
    gpt,
    init_gpt,
    init_params,
    init_taps,
)


@pytest.mark.slow
class TestJax(FiveRecipes):
    framework, model, score, lost = "jax", "gpt", "perplexity", 0.08

    def test_the_histogram_holds_activations_too(self, runs: list[Run]) -> None:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(init_params(0)))
        histogram = runs[0].histogram
        assert histogram.nonzero + int(histogram.zeros) > 2 * parameters


def test_the_text_is_half_a_megabyte_of_every_character() -> None:
    together = np.concatenate([data.load_text().train, data.load_text().test])
    assert 300_000 < len(together) < 1_000_000
    assert set(np.unique(together).tolist()) == set(range(len(VOCABULARY)))
    assert "import" in "".join(VOCABULARY[number] for number in together[:20_000])


def test_the_gpt_does_not_see_what_it_is_to_predict() -> None:
    params = init_gpt(jax.random.key(0), vocabulary=9, length=8, width=16, depth=2)
    words = jax.random.randint(jax.random.key(1), (1, 8), 0, 9)
    taps = init_taps(params, words)
    run = jax.jit(gpt, static_argnums=3)
    before, after = run(params, taps, words, 2), run(params, taps, words.at[0, 5].set((words[0, 5] + 1) % 9), 2)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert not np.array_equal(before[:, 5:], after[:, 5:])


def test_the_second_heads_gradient_is_too_small_for_fp16() -> None:
    assert data.AHEAD_WEIGHT / (data.LENGTH * data.SEQUENCES) < FP16.smallest_subnormal / 2


@pytest.mark.slow
def test_unscaled_fp16_fails_where_fp32_and_scaled_fp16_learn() -> None:
    runs = compared("jax", load_demo("jax").steps["gpt"])
    perplexity = [run.scores["perplexity"] for run in runs]
    assert perplexity[1] > 0.9 * len(VOCABULARY)
    assert max(perplexity[0], *perplexity[2:]) < 15
    main_head = [run.scores["main head"] for run in runs]
    assert max(main_head) < 1.1 * min(main_head)  # nothing but the second head shows that something is wrong
