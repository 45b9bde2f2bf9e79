"""The comparison: the same training four ways."""

from collections.abc import Callable, Iterator

from gradscale.demo.digits import Digits
from gradscale.demo.precision import half, single
from gradscale.demo.train import Run, Way, train
from gradscale.formats import FP16
from gradscale.histogram import best_static_scale
from gradscale.policy import Dynamic, NoScaling, Static

WAYS = ("FP32", "FP16 unscaled", "FP16 static", "FP16 dynamic")

GROWTH_INTERVAL = 50
"""Clean steps before the dynamic scale doubles: the usual 2,000 are more than the demo has."""


def compare(digits: Digits, seed: int, steps: int, tick: Callable[[str], None]) -> Iterator[Run]:
    """Yields the four runs, each when it is done.

    The static scale is the best that the exponents of the FP32 run's own gradients allow. The unscaled run has the
    scale 1 and is checked for overflow like the others, so that all it can suffer from is underflow.

    Args:
        digits: the data.
        seed: of the start and the batches.
        steps: how many each run has.
        tick: called with the name of the run after each step.
    """

    def trained(way: Way) -> Run:
        return train(way, digits, seed, steps, lambda: tick(way.name))

    full, unscaled, static, dynamic = WAYS
    reference = trained(Way(full, NoScaling(), single))
    yield reference
    yield trained(Way(unscaled, Static(1.0), half))
    yield trained(Way(static, Static(best_static_scale(reference.histogram, FP16)), half))
    yield trained(Way(dynamic, Dynamic(growth_interval=GROWTH_INTERVAL), half))
