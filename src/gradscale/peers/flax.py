"""flax: `flax.training.dynamic_scale.DynamicScale`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, values_of
from gradscale.peers._saved import Imported, given, picked, started
from gradscale.peers._settings import check_float32, check_limit, check_positive
from gradscale.peers.ladder import Ladder
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState

_FLOAT32 = np.finfo(np.float32)


def dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    fin_steps: int = 0,
    scale: float = 65536.0,
    minimum_scale: float | None = float(_FLOAT32.tiny),
) -> Ladder:
    """Returns the rule of `DynamicScale`: float32, from `minimum_scale` up to the largest float32 number.

    It needs one clean step more than `growth_interval` to grow.
    """
    check_positive("growth_factor", growth_factor)
    check_positive("backoff_factor", backoff_factor)
    check_float32("scale", scale)
    check_limit("minimum_scale", minimum_scale or 0.0)
    for name, value in (("growth_interval", growth_interval), ("fin_steps", fin_steps)):
        if value:
            check_count(name, value)
    # flax 0.12.8 tests `fin_steps == growth_interval` before it counts the step: hence the 1.
    return Ladder(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        init_clean_steps=fin_steps,
        floor=_flushed(minimum_scale or 0.0),
        ceiling=float(_FLOAT32.max),
        flushes=True,
    )


def _flushed(limit: float) -> float:
    # XLA flushes a subnormal floor to zero on a CPU, like the scale itself.
    return 0.0 if limit < _FLOAT32.tiny else limit


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `fin_steps` and `scale`; the other fields of `DynamicScale` may be added."""
    settings = ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale")
    saved = picked("A flax DynamicScale", mapping, ("fin_steps", "scale"), settings)
    keywords = given(saved, "growth_factor", "backoff_factor", "minimum_scale", counts=("growth_interval",))
    policy = dynamic_scale(fin_steps=saved.count("fin_steps"), **keywords)
    return started(replace(policy, init_scale=float(saved.scale32("scale"))))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a state dict for `flax.serialization.from_state_dict`.

    That function takes no other keys: the settings are not in it, and must be given to `DynamicScale` again.
    """
    ladder_for("flax's DynamicScale", policy, dynamic_scale(), (*COMMON_SETTINGS, "floor"))
    values = values_of(state)
    return {"fin_steps": values.count("clean_steps"), "scale": values.scale("scale")}


VARIANTS = {"DynamicScale": dynamic_scale}
