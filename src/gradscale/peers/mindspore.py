"""MindSpore: the update cells, the scalers of `amp`, and the managers of `Model`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, shared_factor, values_of
from gradscale.peers._saved import Imported, Saved, check_order, given, last_name, picked, started, without_weights
from gradscale.peers._settings import check_float32, check_positive
from gradscale.peers.jmp import unwrapped, wrapped
from gradscale.peers.ladder import Ladder, LadderState, compiled, one_factor_ladder
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.static import Static
from gradscale.record import Record

_CELL = ("scale_sense", "current_iterator_step", "last_overflow_iterator_step")
_SCALER = ("scale_value", "counter")
_SETTINGS = ("scale_factor", "scale_window")
_BAD_STEP_MAX = 1000
"""A literal in MindSpore's `DynamicLossScaleManager`."""


def dynamic_update_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> Ladder:
    """Returns the rule of `nn.DynamicLossScaleUpdateCell`: float32, down to 1, up to infinity, where it stays.

    It multiplies by the reciprocal of `scale_factor` to back off.
    """
    _check(scale_factor, scale_window)
    check_float32("loss_scale_value", loss_scale_value)
    return compiled(one_factor_ladder(loss_scale_value, scale_factor, scale_window, overshoot=True, floor=1.0))


def dynamic_loss_scaler(scale_value: float, scale_factor: float, scale_window: int) -> Ladder:
    """Returns the rule of `amp.DynamicLossScaler`: float32, divided down to 1, never grown to infinity."""
    _check(scale_factor, scale_window)
    check_float32("scale_value", scale_value)
    return one_factor_ladder(scale_value, scale_factor, scale_window, floor=1.0, refuses_inf=True)


def _check(scale_factor: float, scale_window: int) -> None:
    check_positive("scale_factor", scale_factor)
    check_count("scale_window", scale_window)


@dataclass(frozen=True, slots=True, repr=False)
class MindsporeManager(Record):
    """The rule of `DynamicLossScaleManager`, which runs on the host: Python floats, down to 1.

    After more than 1000 overflows in a row the manager raises; there the state is `stuck`.

    Attributes:
        init_loss_scale: scale of the first step.
        scale_factor: multiplies the scale when it grows; its reciprocal, when it backs off.
        scale_window: clean steps before the scale grows.
    """

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000

    needs: ClassVar[frozenset[str]] = Ladder.needs

    def __post_init__(self) -> None:
        _check(self.scale_factor, self.scale_window)
        check_positive("init_loss_scale", self.init_loss_scale)
        if self.init_loss_scale < 1:
            raise ValueError(
                f"`init_loss_scale` must be at least 1. Received: init_loss_scale={self.init_loss_scale!r}."
            )

    def start(self) -> LadderState:
        """Returns the state before the first step, with its scale in float64."""
        return self._ladder().start()

    def next(self, state: LadderState, seen: Seen, xp: Namespace) -> LadderState:
        """Returns the state after one step. `stuck` means that the manager raises."""
        moved = self._ladder().next(state, seen, xp)
        return replace(moved, stuck=moved.consecutive_skips > _BAD_STEP_MAX)

    def _ladder(self) -> Ladder:
        return Ladder(
            init_scale=self.init_loss_scale,
            growth_factor=self.scale_factor,
            backoff_factor=1 / self.scale_factor,
            growth_interval=self.scale_window,
            floor=1.0,
            arithmetic="float64",
        )


def fixed_manager(loss_scale: float = 128.0, drop_overflow_update: bool = True) -> Static:
    """Returns the rule of `FixedLossScaleManager`; `Static` skips a step that overflows, asked to or not."""
    del drop_overflow_update
    return Static(loss_scale)


def fixed_update_cell(loss_scale_value: float) -> Static:
    """Returns the rule of `nn.FixedLossScaleUpdateCell`."""
    return Static(loss_scale_value)


def static_loss_scaler(scale_value: float) -> Static:
    """Returns the rule of `amp.StaticLossScaler`."""
    return Static(scale_value)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the parameters of an update cell or of an `amp` scaler, or of a checkpoint.

    `scale_sense` or `scale_value` alone is a fixed scale. The settings are not among the parameters; `scale_factor` and
    `scale_window` may be added, and are 2 and 2000 otherwise.
    """
    mapping = without_weights(mapping, (*_CELL, *_SCALER, *_SETTINGS))
    names = set(map(last_name, mapping))
    if names & set(_SCALER):
        return _read_scaler(mapping, "counter" in names)
    if "scale_sense" in names and not names & {*_CELL[1:]}:
        return started(Static(picked("A fixed scale of MindSpore", mapping, ("scale_sense",)).scale("scale_sense")))
    saved = picked("A loss scale cell of MindSpore", mapping, _CELL, _SETTINGS)
    policy = replace(dynamic_update_cell(1.0, **_settings(saved)), init_scale=float(saved.scale32("scale_sense")))
    step, last = saved.count(_CELL[1], lowest=1), saved.count(_CELL[2])
    return started(policy, clean_steps=check_order(saved, _CELL[2], _CELL[1], step - last - 1))


def _read_scaler(mapping: Mapping[str, Any], dynamic: bool) -> Imported:
    what = "A loss scaler of mindspore.amp"
    if not dynamic:
        return started(Static(picked(what, mapping, ("scale_value",)).scale("scale_value")))
    saved = picked(what, mapping, _SCALER, _SETTINGS)
    policy = replace(dynamic_loss_scaler(1.0, **_settings(saved)), init_scale=float(saved.scale32("scale_value")))
    return started(policy, clean_steps=wrapped(saved.count("counter"), policy.growth_interval))


def _settings(saved: Saved) -> dict[str, Any]:
    return {"scale_factor": 2.0, "scale_window": 2000} | given(saved, "scale_factor", counts=("scale_window",))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the parameters of the cell or of the scaler of `amp`, and their two settings, by name.

    A policy that is neither's own is written as the cell's, which is what a `Model` saves.
    """
    values = values_of(state)
    if isinstance(policy, Static):
        return {"scale_sense": values.scale("scale")}
    if isinstance(policy, MindsporeManager):
        policy = dynamic_update_cell(policy.init_loss_scale, policy.scale_factor, policy.scale_window)
    system, clean_steps = "MindSpore", values.count("clean_steps", lowest=-1)
    rule = dynamic_update_cell(1.0, 2.0, 2000)
    ladder = ladder_for(system, policy, rule, COMMON_SETTINGS)
    window = int(ladder.growth_interval)
    settings = {"scale_factor": shared_factor(system, ladder), "scale_window": window}
    if ladder.refuses_inf:
        counter = unwrapped(clean_steps, window)
        return {"scale_value": values.scale("scale"), "counter": counter, **settings}
    # The cell counts its iterations from 1.
    step = max(values.count("applied") + values.count("skipped"), clean_steps) + 1
    return {**dict(zip(_CELL, (values.scale("scale"), step, step - clean_steps - 1), strict=True)), **settings}


VARIANTS = {
    "nn.DynamicLossScaleUpdateCell": dynamic_update_cell,
    "amp.DynamicLossScaler": dynamic_loss_scaler,
    "DynamicLossScaleManager": MindsporeManager,
    "FixedLossScaleManager": fixed_manager,
    "nn.FixedLossScaleUpdateCell": fixed_update_cell,
    "amp.StaticLossScaler": static_loss_scaler,
}
