"""The comparison: the same training four ways."""

from collections.abc import Mapping

from gradscale.demo.digits import load_digits
from gradscale.demo.mxnet.train import Way, train
from gradscale.demo.numpy.compare import GROWTH_INTERVAL
from gradscale.demo.numpy.model import SUBJECT
from gradscale.demo.run import WAYS, Comparison, Demo, Run, Tick
from gradscale.formats import FP16
from gradscale.histogram import best_static_scale
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import NoScaling, Static


def compare(plan: Mapping[str, int], seed: int, tick: Tick) -> list[Comparison]:
    """Returns the comparison of the only model there is.

    The static scale is the best that the exponents of the FP32 run's own gradients allow. The unscaled run has the
    scale 1 and is checked for overflow like the others, so that all it can suffer from is underflow.

    Args:
        plan: the model, and how many steps each run has.
        seed: of the split, the start and the batches.
        tick: called with the names of the model and the way after each step.
    """
    digits = load_digits(seed)

    def trained(way: Way) -> Run:
        return train(way, digits, seed, plan[SUBJECT.model], lambda: tick(SUBJECT.model, way.name))

    full, unscaled, static, dynamic = WAYS
    reference = trained(Way(full, NoScaling(), "float32"))
    runs = [
        reference,
        trained(Way(unscaled, Static(1.0), "float16")),
        trained(Way(static, Static(best_static_scale(reference.histogram, FP16)), "float16")),
        trained(Way(dynamic, Dynamic(growth_interval=GROWTH_INTERVAL), "float16")),
    ]
    return [Comparison(SUBJECT, runs)]


DEMO = Demo(ways=WAYS, steps={SUBJECT.model: 800}, compare=compare)
