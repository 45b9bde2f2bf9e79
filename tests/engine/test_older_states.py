"""Saved scalers of an older rule are refused, with what is wrong and what to do."""

from typing import Any

import pytest
from tests.engine.older_states import FIX, GONE, HEADROOM, LOG_MAX, REFUSED_POLICY, REFUSED_STATE

from gradscale import Headroom
from gradscale.engine.saved import read_saved
from gradscale.numpy import LossScaler
from gradscale.policies.headroom import HeadroomState


@pytest.mark.parametrize("read", [read_saved, lambda saved: LossScaler().load_state_dict(saved)])
def test_a_saved_scaler_of_an_older_rule_is_refused(read: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED_POLICY):
        read(HEADROOM)
    with pytest.raises(ValueError, match=REFUSED_STATE):
        read(LOG_MAX)
    with pytest.raises(ValueError, match=rf"A saved HeadroomState has no such key: {GONE}{FIX}"):
        read({"policy": Headroom().to_dict(), "state": HEADROOM["state"]})


def test_a_state_of_an_older_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"A saved HeadroomState has no such key: {GONE}{FIX}"):
        HeadroomState.from_dict(HEADROOM["state"])


def test_what_a_scaler_needs_is_named_where_the_file_has_less() -> None:
    state = {key: value for key, value in Headroom().start().to_dict().items() if key != "ceiling"}
    with pytest.raises(ValueError, match=rf"A saved HeadroomState needs every key. Missing: \['ceiling'\]{FIX}"):
        HeadroomState.from_dict(state)
