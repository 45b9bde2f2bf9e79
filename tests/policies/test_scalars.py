"""Rules on scalars of the host, which leave out what no outcome needs, beside the same rules on arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stories import same

from gradscale import FP8_E5M2, Dynamic, Headroom, Histogram, LogMax, Policy
from gradscale.policies.contract import Seen
from gradscale.policies.scalars import EXACT, SCALARS

pytestmark = pytest.mark.skipif(not EXACT, reason="numpy 1 makes float64 of a float32 scalar times a number")

POLICIES = [
    Headroom(),
    Headroom(FP8_E5M2, init_scale=1.0, leak=0.5, rise_bits=0.0),
    LogMax(),
    Histogram(),
    Dynamic(growth_interval=2, hysteresis=2),
]

exponents = st.integers(-140, 120).map(lambda exponent: float(np.ldexp(np.float32(1.37), exponent)))
steps = st.builds(
    lambda amax, finite, loss_finite, share: Seen(
        finite=np.bool_(finite),
        loss_finite=np.bool_(loss_finite),
        amax=np.float32(amax if finite else np.inf),
        upper_share=np.float32(share),
    ),
    exponents | st.just(0.0),
    st.sampled_from([True, True, False]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0.0, 2.0**-20, 1.0]),
)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(story=st.lists(steps, max_size=30))
def test_rule_on_scalars_has_the_states_of_the_rule_on_arrays(policy: Policy, story: list[Seen]) -> None:
    namespaces: list[Any] = [SCALARS, np]
    states = [policy.start(), policy.start()]
    with np.errstate(all="ignore"):
        for seen in story:
            states = [policy.next(state, seen, xp) for state, xp in zip(states, namespaces, strict=True)]
            assert same(*states)
