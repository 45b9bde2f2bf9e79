"""The answers of a scaler to names of other scalers, checked against what the scaler has. For every adapter."""

import re
from typing import Any

import pytest

from gradscale.engine.hints import ANSWERS, MEANINGS

SCALED_BY = {"keras": "optimizer"}
"""What the answers of an adapter call its scaler, where it is not `scaler`."""


def check_answers(scaler: Any, adapter: str) -> None:
    """Asserts that every name of the table is one of `scaler`'s own or answered, with names that `scaler` has."""
    for meaning, names in MEANINGS.items():
        for name in names:
            answer = ANSWERS[adapter].get(meaning)
            if hasattr(scaler, name) or answer is None:
                continue
            with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}. {answer}")) as caught:
                getattr(scaler, name)
            assert (caught.value.name, caught.value.obj is scaler) == (name, True)
            assert getattr(scaler, name, None) is None
    mentioned = re.findall(rf"`{SCALED_BY.get(adapter, 'scaler')}\.(\w+)", " ".join(ANSWERS[adapter].values()))
    assert mentioned
    own = {*dir(type(scaler)), *vars(scaler)}  # not `hasattr`: a property may raise before the first step
    assert set(mentioned) - own == set()
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_name'$"):
        scaler.no_such_name  # noqa: B018
