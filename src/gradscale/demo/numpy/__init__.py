"""The demo in numpy, with nothing but numpy under it: true float16 arithmetic, written out."""

from gradscale.demo.numpy.compare import DEMO, compare
from gradscale.demo.numpy.train import Way

__all__ = ["DEMO", "Way", "compare"]
