"""The demo: a network on real data in true FP16, with and without loss scaling, and nothing but numpy under it.

Read `train.py` first: its loop is how `gradscale.numpy` is used.
"""

from gradscale.demo.compare import WAYS, compare
from gradscale.demo.train import Run, Way

__all__ = ["WAYS", "Run", "Way", "compare"]
