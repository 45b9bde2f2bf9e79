"""The comparison: the same training four ways."""

from collections.abc import Callable, Iterator, Mapping

from gradscale.demo.digits import Digits, load_digits
from gradscale.demo.numpy.model import SUBJECT
from gradscale.demo.numpy.precision import half, single
from gradscale.demo.numpy.train import Way, train
from gradscale.demo.run import WAYS, Comparison, Demo, Run, Tick
from gradscale.formats import FP16
from gradscale.histogram import best_static_scale
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static

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


def _compare_all(plan: Mapping[str, int], seed: int, tick: Tick) -> list[Comparison]:
    """Returns the comparison of the only model there is."""
    runs = compare(load_digits(seed), seed, plan[SUBJECT.model], lambda way: tick(SUBJECT.model, way))
    return [Comparison(SUBJECT, list(runs))]


DEMO = Demo(ways=WAYS, steps={SUBJECT.model: 800}, compare=_compare_all)
