"""PopART: automatic loss scaling, which watches the share of gradients above an edge."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradscale.peers._form import values_of
from gradscale.peers._saved import Imported, Saved, picked, started
from gradscale.policies.arithmetic import Namespace, bounded
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, as_single, check_count, check_number, check_scale
from gradscale.policies.contract import Policy, ScaleState, Seen, counted
from gradscale.policies.static import NoScaling, Static
from gradscale.record import Array, Record, leaf

_WHAT = "PopART's automatic loss scaling"
_STATISTICS = "autoLossScaleStats"
_FACTOR = "lossScaleUpdateFactor"
_HIGHEST_IN_FP16 = 2.0**15
_MAX_IN_FP16 = 65535.0
"""FP16's maximum as PopART has it. It is 65504."""


@dataclass(frozen=True, slots=True)
class PopartState(ScaleState):
    """State of a `PopartScaling`.

    Attributes:
        update_factor: what PopART saves as `lossScaleUpdateFactor`; the scale is `loss_scaling` times it.
        counter: steps since the last update; -1 before the first step, so that this one updates.
    """

    update_factor: Array = leaf("float32", 1)
    counter: Array = leaf("int32", -1, signed=True)


@dataclass(frozen=True, slots=True, repr=False)
class PopartScaling(Record):
    """The rule of PopART's automatic loss scaling: halves or doubles the scale at every update.

    The first step updates, and each `update_period`-th after it. A share above `threshold` of gradients above the edge
    halves the scale; any other doubles it. PopART skips no step: an overflow is only one more gradient above the edge.
    Here a step with one is skipped, and halves the scale.

    In float32. PopART's FP16 factor rounds no differently while `loss_scaling` is a power of two. In PopART, a factor
    that has reached 0 stays there. Here, factor and scale stop at 2**-126 and 2**126.

    Attributes:
        loss_scaling: the optimizer's `lossScaling`, and the scale of the first step.
        threshold: share of the gradients that may be above the edge.
        update_period: steps from one update to the next.
        clips: whether the scale is bounded to 2**15, as it is in FP16.
        edge: where the edge is, as a share of FP16's largest number.
    """

    loss_scaling: float = 1.0
    threshold: float = 1e-7
    update_period: int = 1
    clips: bool = True
    edge: float = 0.0625

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "upper_share"})

    def __post_init__(self) -> None:
        check_scale("lossScaling", self.loss_scaling)
        object.__setattr__(self, "loss_scaling", as_single("lossScaling", self.loss_scaling))
        check_number("thresholdUpperCountProportion", self.threshold)
        if not 0 <= self.threshold <= 1:
            raise ValueError(
                "`thresholdUpperCountProportion` is a share, between 0 and 1. "
                f"Received: thresholdUpperCountProportion={self.threshold!r}."
            )
        check_count("updatePeriod", self.update_period)
        check_number("binEdgeLocation", self.edge)
        if not 0 < self.edge <= 1:
            raise ValueError(
                f"`binEdgeLocation` is a share, above 0 and at most 1. Received: binEdgeLocation={self.edge!r}."
            )

    @property
    def edge_magnitude(self) -> float:
        """The edge: scaled gradients above it count towards `Seen.upper_share`."""
        return self.edge * _MAX_IN_FP16

    def start(self) -> PopartState:
        """Returns the state before the first step."""
        return PopartState(scale=np.float32(self.loss_scaling))

    @np.errstate(over="ignore")
    def next(self, state: PopartState, seen: Seen, xp: Namespace) -> PopartState:
        """Returns the state after one step. `stuck` means that an update could not lower the scale."""
        too_high = xp.logical_or(seen.upper_share > self.threshold, xp.logical_not(seen.finite))
        # From -1, so that the first step has the counter 0 and updates.
        counter = (state.counter + 1) % self.update_period
        updates = counter == 0
        moved = self._clipped(xp.where(too_high, state.update_factor * 0.5, state.update_factor * 2.0), xp)
        factor = xp.where(updates, moved, state.update_factor)
        scale = factor * self.loss_scaling
        return counted(
            state,
            xp.logical_and(seen.finite, seen.loss_finite),
            xp,
            scale=scale,
            update_factor=factor,
            counter=counter,
            stuck=xp.logical_and(xp.logical_and(updates, too_high), xp.logical_not(scale < state.scale)),
        )

    def _clipped(self, factor: Array, xp: Namespace) -> Array:
        """Returns the factor within the bounds that the scale has, and within those of a normal number itself."""
        highest = _HIGHEST_IN_FP16 if self.clips else HIGHEST_SCALE
        factor = bounded(factor, LOWEST_SCALE / self.loss_scaling, highest / self.loss_scaling, xp)
        return bounded(factor, LOWEST_SCALE, HIGHEST_SCALE, xp)


def automatic_loss_scaling(
    enabled: bool = True,
    binEdgeLocation: float = 0.0625,
    thresholdUpperCountProportion: float = 1e-7,
    toTrackTensors: Sequence[str] | None = None,
    updatePeriod: int = 1,
    gradientTensorTrackingMethod: str | None = None,
    lossScaling: float = 1.0,
    clipOutput: bool = True,
) -> PopartScaling | Static | NoScaling:
    """Returns the rule that `SessionOptions.automaticLossScalingSettings` and the optimizer's `lossScaling` set up.

    Unlike in PopART, `enabled` is True by default. `toTrackTensors` and `gradientTensorTrackingMethod` select which
    gradients PopART counts, and are ignored. `clipOutput`: the loss scale is in FP16, and bounded to 2**15.
    """
    del toTrackTensors, gradientTensorTrackingMethod
    if not enabled:
        return NoScaling() if lossScaling == 1 else Static(lossScaling)
    return PopartScaling(lossScaling, thresholdUpperCountProportion, updatePeriod, clipOutput, binEdgeLocation)


_FIELDS = {
    "lossScaling": "loss_scaling",
    "thresholdUpperCountProportion": "threshold",
    "updatePeriod": "update_period",
    "clipOutput": "clips",
    "binEdgeLocation": "edge",
}


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the saved variables: an update factor, and a counter if the period is not 1.

    The optimizer's `lossScaling` must be added, as the scale is their product; the settings may be. Without an update
    factor the scale is fixed. The statistics that PopART saves with them are cleared in every step, and ignored.
    """
    kept = {str(key): value for key, value in mapping.items() if not str(key).endswith(_STATISTICS)}
    # A counter is saved with its operator's name in front.
    named = {"counter" if key.endswith("_counter") else key: value for key, value in kept.items()}
    if set(named) == {"lossScaling"}:
        return started(Static(Saved(_WHAT, named).factor("lossScaling")))
    saved = picked(_WHAT, named, ("lossScaling", _FACTOR), ("counter", *_FIELDS))
    readers: dict[str, Callable[[str], Any]] = {
        "lossScaling": saved.factor,
        "updatePeriod": saved.count,
        "clipOutput": saved.flag,
    }
    policy = PopartScaling(**{_FIELDS[key]: readers.get(key, saved.number)(key) for key in _FIELDS if key in named})
    factor = saved.scale32(_FACTOR)
    counter = saved.count("counter", lowest=-1) if "counter" in named else 0
    return started(policy, scale=factor * np.float32(policy.loss_scaling), update_factor=factor, counter=counter)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the values of the saved variables, and the settings; `lossScaling` alone for a static scale."""
    values = values_of(state)
    if isinstance(policy, Static):
        return {"lossScaling": values.scale("scale")}
    if not isinstance(policy, PopartScaling):
        raise TypeError(
            "PopART can continue from its own preset or from `Static`; it knows no other rule. "
            f"Received: {type(policy).__name__}."
        )
    variables = {_FACTOR: values.scale("update_factor"), "counter": values.count("counter", lowest=-1)}
    return variables | {key: getattr(policy, field) for key, field in _FIELDS.items()}


VARIANTS = {"automaticLossScalingSettings": automatic_loss_scaling, "AutomaticLossScale": automatic_loss_scaling}
