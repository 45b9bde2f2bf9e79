"""The demo in JAX: a GPT with two heads, its weights in float32 and its arithmetic in FP16, one compiled step."""

from gradscale.demo.jax.compare import DEMO, compare
from gradscale.demo.jax.train import Way

__all__ = ["DEMO", "Way", "compare"]
