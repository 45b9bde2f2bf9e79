"""The comparison: the same training four ways."""

from collections.abc import Mapping

from gradscale.demo.jax.language import FULL, SUBJECT, Text
from gradscale.demo.jax.train import Way, train
from gradscale.demo.run import WAYS, Comparison, Demo, Run, Tick
from gradscale.formats import FP16
from gradscale.histogram import best_static_scale
from gradscale.jax.casting import get_policy
from gradscale.policies.headroom import Headroom
from gradscale.policies.static import NoScaling, Static

HALF = get_policy("params=f32,compute=f16,output=f32")


def compare(plan: Mapping[str, int], seed: int, tick: Tick) -> list[Comparison]:
    """Returns the comparison of the only model there is.

    The static scale is the best that the exponents of the FP32 run's own gradients allow. The unscaled run has the
    scale 1 and is checked for overflow like the others, so that all it can suffer from is underflow.

    Args:
        plan: the model, and how many steps each run has.
        seed: of the start and the batches.
        tick: called with the names of the model and the way after each step.
    """
    text = Text()

    def trained(way: Way) -> Run:
        return train(way, text, seed, plan[SUBJECT.model], lambda: tick(SUBJECT.model, way.name))

    full, unscaled, static, dynamic = WAYS
    reference = trained(Way(full, NoScaling(), FULL))
    runs = [
        reference,
        trained(Way(unscaled, Static(1.0), HALF)),
        trained(Way(static, Static(best_static_scale(reference.histogram, FP16)), HALF)),
        trained(Way(dynamic, Headroom(), HALF)),
    ]
    return [Comparison(SUBJECT, runs)]


DEMO = Demo(ways=WAYS, steps={SUBJECT.model: 300}, compare=compare)
