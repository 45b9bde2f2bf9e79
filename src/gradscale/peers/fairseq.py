"""fairseq: `DynamicLossScaler`, which tolerates a share of overflows and stops the run at the lowest scale."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from gradscale._text import shown_keys
from gradscale.peers._form import ladder_for, modulo_rule, values_of
from gradscale.peers._saved import Imported, Saved, settings_of, started, whole_or_inside
from gradscale.peers._settings import Count, Growth, Limit, Positive, Whole, check_fields, checked
from gradscale.peers.ladder import LadderState
from gradscale.policies.arithmetic import Namespace, larger
from gradscale.policies.contract import Policy, ScaleState, Seen, counted
from gradscale.record import Array, Record, leaf


@dataclass(frozen=True, slots=True)
class FairseqState(LadderState):
    """State of `FairseqScaler`. `clean_steps` is -1 after a stop, because the stopped iteration is not counted.

    Attributes:
        since_rescale: iterations since the scale last moved, this one included.
        overflows_since_rescale: overflows since the scale last backed off. Growth does not clear them.
    """

    since_rescale: Array = leaf("int32", 1)
    overflows_since_rescale: Array = leaf("int32", 0)


@dataclass(frozen=True, slots=True, repr=False)
class FairseqScaler(Record):
    """The rule of fairseq's `DynamicLossScaler`, in Python floats, with its own names.

    Attributes:
        init_scale: scale of the first step.
        scale_factor: multiplies the scale when it grows, and divides it when it backs off.
        scale_window: clean steps before the scale grows.
        tolerance: share of overflows since the last change from which on the scale backs off.
        threshold: a backoff never ends below; None for no floor.
        min_loss_scale: an overflow that leaves the scale here or below stops the run: the scale is kept, and `stuck`.
    """

    init_scale: Positive = 2.0**15
    scale_factor: Growth = 2.0
    scale_window: Whole = 2000
    tolerance: Limit = 0.0
    threshold: Limit | None = None
    min_loss_scale: Limit = 1e-4

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self) -> FairseqState:
        """Returns the state before the first step."""
        return FairseqState(scale=np.float64(self.init_scale))

    @np.errstate(over="ignore")
    def next(self, state: FairseqState, seen: Seen, xp: Namespace) -> FairseqState:
        """Returns the state after one step. Gradients alone move the scale, as in fairseq."""
        clean, overflow = seen.finite, xp.logical_not(seen.finite)
        # `(_iter - _last_overflow_iter) % scale_window == 0`: the step after an overflow is at distance 1.
        grows = xp.logical_and(clean, (state.clean_steps + 1) % self.scale_window == 0)
        backs_off = xp.logical_and(overflow, self._too_many(state, xp))
        wanted = xp.where(backs_off, self._lowered(state.scale, xp), state.scale)
        # fairseq restores the previous scale and raises FloatingPointError, before it increases its iteration.
        stops = xp.logical_and(overflow, wanted <= self.min_loss_scale)
        since_rescale = xp.where(xp.logical_or(grows, backs_off), 0, state.since_rescale)
        clean_steps = xp.where(xp.logical_or(grows, overflow), 0, state.clean_steps + 1)
        overflows = xp.where(overflow, state.overflows_since_rescale + 1, state.overflows_since_rescale)
        return counted(
            state,
            xp.logical_and(clean, seen.loss_finite),
            xp,
            scale=xp.where(grows, state.scale * self.scale_factor, xp.where(stops, state.scale, wanted)),
            clean_steps=xp.where(stops, -1, clean_steps),
            stuck=xp.logical_or(stops, xp.logical_and(backs_off, wanted == state.scale)),
            since_rescale=xp.where(stops, since_rescale, since_rescale + 1),
            overflows_since_rescale=xp.where(backs_off, 0, overflows),
        )

    def _too_many(self, state: FairseqState, xp: Namespace) -> Array:
        """Returns whether one more overflow reaches the tolerance."""
        # No iteration has passed where one is retried after a stop; fairseq then counts 1000.
        iterations = xp.where(state.since_rescale == 0, 1000, state.since_rescale)
        return (state.overflows_since_rescale + 1) / iterations >= self.tolerance

    def _lowered(self, scale: Array, xp: Namespace) -> Array:
        lowered = scale / self.scale_factor
        return lowered if self.threshold is None else larger(lowered, self.threshold, xp)


def fp16_optimizer(
    fp16_init_scale: float = 2.0**7,
    fp16_scale_window: int | None = None,
    fp16_scale_tolerance: float = 0.0,
    threshold_loss_scale: float | None = None,
    min_loss_scale: float = 1e-4,
    distributed_world_size: int = 1,
    model_parallel_size: int = 1,
    update_freq: Sequence[int] | int = (1,),
) -> FairseqScaler:
    """Returns the rule that fairseq's command line asks for. The window is 2**14 samples' worth unless it is given."""
    if fp16_scale_window is None:
        schedule = [update_freq] if isinstance(update_freq, int) else list(update_freq)
        if len(schedule) != 1:
            raise ValueError(
                f"`fp16_scale_window` must be given with a schedule of `update_freq`. Received: {schedule}."
            )
        fp16_scale_window = _window(distributed_world_size, model_parallel_size, schedule[0])
    return FairseqScaler(
        fp16_init_scale, 2.0, fp16_scale_window, fp16_scale_tolerance, threshold_loss_scale, min_loss_scale
    )


@checked
def _window(distributed_world_size: Count, model_parallel_size: Count, update_freq: Count) -> int:
    # fairseq's formula, with its divisions in floating point and one `int` at the end.
    return int(2**14 / max(int(distributed_world_size / model_parallel_size), 1) / update_freq)


_CONFIG = tuple(inspect.signature(fp16_optimizer).parameters)[1:]  # the scale is that of the optimizer
_CONFIG_SECTIONS = ("common", "optimization", "distributed_training")


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a checkpoint, or of its `last_optimizer_state`.

    fairseq saves the scale and no counters, so they start again, as they do when fairseq itself resumes. The settings
    come from the checkpoint's `cfg` or `args`; without them, those of the class are assumed.
    """
    settings = settings_of(mapping.get("args"), _CONFIG)
    for section in _CONFIG_SECTIONS if isinstance(cfg := mapping.get("cfg"), Mapping) else ():
        settings |= settings_of(cast("Mapping[str, Any]", cfg).get(section), _CONFIG)
    policy = fp16_optimizer(**settings) if settings else FairseqScaler()
    for part in whole_or_inside(mapping, "last_optimizer_state"):
        if "loss_scale" in part:
            return started(policy, scale=Saved("fairseq's optimizer", part).scale("loss_scale"))
    raise ValueError(
        "A fairseq checkpoint of an FP16 run holds `loss_scale` in its `last_optimizer_state`. "
        f"Received keys: {shown_keys(mapping)}. Runs with --amp, BF16 or FP32 save none."
    )


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns what fairseq's FP16 optimizer adds to the dict of the optimizer inside it: the scale alone."""
    if not isinstance(policy, FairseqScaler):
        rule = modulo_rule(1.0, 2.0, 2000, floor=0.0)
        ladder_for("fairseq's DynamicLossScaler", policy, rule, ("growth_interval", "floor"))
    return {"loss_scale": values_of(state).scale("scale")}


VARIANTS = {"DynamicLossScaler": FairseqScaler, "FP16Optimizer": fp16_optimizer}
