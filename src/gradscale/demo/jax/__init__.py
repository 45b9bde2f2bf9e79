"""The demo in JAX: a GPT with two heads, float32 weights and FP16 arithmetic, one compiled step."""

from functools import partial

from gradscale.demo.jax.train import JaxTrainer
from gradscale.demo.text import LANGUAGE, load_text
from gradscale.demo.train import RECIPES, Demo, Experiment

DEMO = Demo(
    RECIPES,
    [Experiment(LANGUAGE, 300, lambda seed: partial(JaxTrainer, load_text(), seed), 45.0)],
)
