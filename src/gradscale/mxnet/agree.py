"""Agree: one measurement for all contexts, and the flags that gradients do not carry for all workers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import gluon, nd

from gradscale.engine.culprits import count_nonfinite
from gradscale.engine.measurement import LARGEST_NORM, NOTHING_READ, Measurement
from gradscale.engine.plan import Plan
from gradscale.mxnet.gradients import Gradient, Gradients
from gradscale.mxnet.measure import ContextMeasurement, measure


class Observation(NamedTuple):
    """What was found in the gradients of all contexts.

    Attributes:
        measurement: one size per parameter, and one answer for all contexts.
        names: the parameters.
        counts: elements of each gradient that are not finite; empty where all are.
    """

    measurement: Measurement
    names: tuple[str, ...]
    counts: tuple[int, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether every gradient is finite, before and after it is divided."""
        return bool(np.isfinite(self.measurement.total))


@np.errstate(divide="ignore", over="ignore", invalid="ignore")  # gradients that are not finite
def observe(gradients: Gradients, plan: Plan, *, divisor: float, rescale: float) -> Observation:
    """Returns what is found in the gradients of all contexts. Synchronizes with the device, unless nothing is read.

    Gradients that are not finite are copied to the host, where their elements are counted. The gradients will be
    divided by `divisor` and multiplied by `rescale`.
    """
    names = tuple(dict.fromkeys(gradient.name for context in gradients for gradient in context))
    if not names or not (plan.checks or plan.norm):
        return Observation(NOTHING_READ, names)
    contexts = measure([[gradient.values for gradient in context] for context in gradients], plan)
    measurement = agree(contexts, plan, divisor=divisor, rescale=rescale)
    sizes, shown = _by_parameter(gradients, measurement)
    observation = Observation(measurement._replace(sizes=np.array(list(sizes.values()))), names)
    if observation.finite:
        return observation
    factor = float(np.divide(rescale, divisor))
    counts = {
        name: 0 if math.isfinite(size) else count_nonfinite(shown[name].values.asnumpy(), factor)
        for name, size in sizes.items()
    }
    return observation._replace(counts=tuple(counts.values()))


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def agree(measured: Sequence[ContextMeasurement], plan: Plan, *, divisor: float, rescale: float) -> Measurement:
    """Returns one measurement for all contexts: it is not finite if a gradient on any of them is not.

    Norms are those of the gradients that the optimizer uses, and include `rescale`. The largest magnitude does not: it
    is that of the backward pass, which must fit the format.
    """
    rescale = abs(rescale)  # some set it to -1 to maximize; `np.max` would not find a -inf
    sizes = np.concatenate([one.sizes for one in measured]) * rescale
    # The optimizer computes in float32, where a finite gradient may overflow when it is divided by a scale below 1.
    divided = (sizes * np.divide(1.0, divisor)).astype(np.float32)
    sizes = np.where(np.isfinite(divided), sizes, divided)
    # Not the norm over all contexts: a key-value store has given them the same gradients, and without one each is
    # updated by its own. To clip by it, inf where its square does not fit float32, as on every adapter.
    norm = np.max([np.linalg.norm(one.sizes) for one in measured])
    return Measurement(
        sizes=sizes,
        total=np.max(sizes),
        amax=np.float64(max(one.amax for one in measured)) if plan.amax else None,
        norm=(np.inf if plan.norm and not norm < LARGEST_NORM else norm) * rescale,
        upper_share=None if plan.edge is None else np.float32(max(one.above for one in measured)),
    )


class Workers:
    """The workers that share a trainer's key-value store. It sums their gradients; this reduces their flags."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._initialized_store: Any = None

    def all(self, *flags: bool) -> list[bool]:
        """Returns for each flag whether it is True on every worker. A collective: every worker must call it."""
        # A trainer with its own all-reduce, such as Horovod's, has no store to reduce flags with. A flag that only this
        # worker sees would make the workers diverge, so it is ignored, and the summed gradients decide.
        if type(self._trainer)._allreduce_grads is not gluon.Trainer._allreduce_grads:
            return [True] * len(flags)
        store = self._trainer._kvstore
        if store is None or store.num_workers == 1:
            return list(flags)
        key = len(self._trainer._params)  # the keys before are the parameters
        count = nd.array([0 if flag else 1 for flag in flags])
        # A store accepts a key only once it was broadcast, and a trainer makes a new store when it is reset.
        if self._initialized_store is not store:
            store.broadcast(key, nd.zeros(len(flags)), out=nd.zeros(len(flags)))
            self._initialized_store = store
        store.pushpull(key, count, out=count)
        return (count.asnumpy() == 0).tolist()


def init_params_and_wait(init_params: Callable[[], None]) -> None:
    """Copies the parameters to the key-value store, and blocks until this worker has received them.

    Replaces `Trainer._init_params`.
    """
    init_params()
    # MXNet itself continues at once and sums gradients under the same keys, so that a slow worker may receive that sum
    # as its weights. No sum is complete without its gradients, so it is enough that every worker blocks here.
    nd.waitall()


def _by_parameter(gradients: Gradients, measurement: Measurement) -> tuple[dict[str, float], dict[str, Gradient]]:
    """Returns each parameter's size and gradient: of the first context where it is not finite, else of the first."""
    sizes: dict[str, float] = {}
    shown: dict[str, Gradient] = {}
    every = [gradient for context in gradients for gradient in context]
    for gradient, size in zip(every, np.asarray(measurement.sizes).tolist(), strict=True):
        if math.isfinite(sizes.get(gradient.name, 0.0)) and (gradient.name not in sizes or not math.isfinite(size)):
            sizes[gradient.name], shown[gradient.name] = size, gradient
    return sizes, shown
