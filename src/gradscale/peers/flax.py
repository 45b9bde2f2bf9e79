"""flax: `flax.training.dynamic_scale.DynamicScale`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradscale.peers._form import Form
from gradscale.peers._saved import Imported
from gradscale.peers._settings import CountOrZero, Float32, Limit, Positive, checked
from gradscale.peers.ladder import Ladder
from gradscale.policies.contract import Policy, ScaleState

_FLOAT32 = np.finfo(np.float32)


@checked
def dynamic_scale(
    growth_factor: Positive = 2.0,
    backoff_factor: Positive = 0.5,
    growth_interval: CountOrZero = 2000,
    fin_steps: CountOrZero = 0,
    scale: Float32 = 65536.0,
    minimum_scale: Limit | None = float(_FLOAT32.tiny),
) -> Ladder:
    """Returns the rule of `DynamicScale`: float32, from `minimum_scale` up to the largest float32 number.

    It needs one clean step more than `growth_interval` to grow.
    """
    floor = minimum_scale or 0.0
    # flax 0.12.8 tests `fin_steps == growth_interval` before it counts the step: hence the 1.
    return Ladder(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        init_clean_steps=fin_steps,
        # XLA flushes a subnormal floor to zero on a CPU, like the scale itself.
        floor=0.0 if floor < _FLOAT32.tiny else floor,
        ceiling=float(_FLOAT32.max),
        flushes=True,
    )


_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_FORM = Form(
    "flax's DynamicScale",
    dynamic_scale,
    "scale",
    "fin_steps",
    {**dict(zip(_SETTINGS, _SETTINGS, strict=True)), "minimum_scale": "floor"},
)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `fin_steps` and `scale`; the other fields of `DynamicScale` may be added."""
    return _FORM.read(mapping)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a state dict for `flax.serialization.from_state_dict`.

    That function takes no other keys: the settings are not in it, and must be given to `DynamicScale` again.
    """
    written = _FORM.write(policy, state)
    return {key: written[key] for key in ("fin_steps", "scale")}


VARIANTS = {"DynamicScale": dynamic_scale}
