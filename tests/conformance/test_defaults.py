"""The policy of a user who gives none: `"auto"` with gradscale's own names, the peer's with those of a drop-in."""

import numpy as np
import pytest
from tests.conformance.adapters import REGISTERED, Adapter
from tests.conformance.scales import SCALE_CASES

from gradscale import Dynamic, Headroom, Policy
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE

AUTO = Headroom()

TORCHS = Dynamic(init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
KERASS = Dynamic(init_scale=2.0**15, growth_interval=2000, min_scale=LOWEST_SCALE, max_scale=HIGHEST_SCALE)
MXNETS = Dynamic(init_scale=2.0**16, growth_interval=2000, min_scale=LOWEST_SCALE, max_scale=2.0**24)

DROP_INS = {"torch-gradscaler": TORCHS, "keras": KERASS, "mxnet": MXNETS}
"""Defaults of the drop-ins, by how their names begin."""


def expected(name: str) -> Policy:
    return next((policy for start, policy in DROP_INS.items() if name.startswith(start)), AUTO)


def test_the_default_policy_is_auto_or_the_peers(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    assert name in REGISTERED
    assert adapter.default() == expected(name)


def test_auto_is_a_policy_everywhere(adapter: Adapter) -> None:
    case = SCALE_CASES[0]
    assert case.policy == AUTO
    session = adapter.open("auto", {"weight": np.zeros(1, np.float32)}, lr=0.125)
    for row in case.rows:
        session.step({"weight": np.array([row.grads[0] * session.state()["scale"]], np.float32)})
        assert session.state()["scale"] == row.scale
