"""Presets and their states go through gradscale's own dict form unchanged."""

import json
from typing import Any

import numpy as np
import pytest
from tests.stories import next_of

from gradscale.engine.saved import policy_from_dict
from gradscale.peers import preset
from gradscale.policies.contract import Seen

PRESETS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("torch", None, {"growth_factor": 1.5, "backoff_factor": 0.8}),
    ("apex", None, {"max_loss_scale": 1e5}),
    ("apex", "update_scale_hysteresis", {"hysteresis": 1, "growth_interval": 3}),
    ("deepspeed", None, {"consecutive_hysteresis": True, "scale_window": 3}),
    ("megatron", None, {"growth_interval": 3}),
    ("fairseq", None, {"threshold": 0.1, "tolerance": 0.3, "scale_window": 2, "scale_factor": 3}),
    ("fairseq", None, {"min_loss_scale": 0.5, "init_scale": 1.0}),
]


@pytest.mark.parametrize(("system", "variant", "config"), PRESETS)
def test_policy_and_state_come_back_from_json(system: str, variant: str | None, config: dict[str, Any]) -> None:
    policy: Any = preset(system, variant, **config)
    assert type(policy).from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    state = policy.start()
    for finite in (True, True, True, True, False, False, False, True):
        state = next_of(policy, state, Seen(finite=np.bool_(finite)))
        assert type(state).from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hysteresis": 2**31}, r"`hysteresis` must fit int32\. Received: 2147483648\. Use one between"),
        ({"late": -(2**31)}, r"`init_clean_steps - late` must fit int32\. Received: 2147483648\."),
        ({"init_clean_steps": -(2**31), "late": 1}, r"`init_clean_steps - late` .* Received: -2147483649\."),
    ],
)
def test_counters_that_int32_cannot_hold_are_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policy_from_dict(preset("deepspeed").to_dict() | settings)
