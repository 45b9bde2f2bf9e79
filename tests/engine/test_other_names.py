"""Names of other loss scalers, on a class that has none of them."""

import copy
import pickle
from typing import ClassVar

import pytest

from gradscale.engine.other_names import ANSWERS, MEANINGS, OtherNames


class Bare(OtherNames):
    _adapter: ClassVar[str] = "numpy"

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def loss_scale(self) -> float:
        return self.missing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class Unlisted(OtherNames):
    pass


def test_a_name_means_one_thing() -> None:
    names = [name for each in MEANINGS.values() for name in each]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("adapter", ANSWERS)
def test_every_adapter_answers_every_meaning(adapter: str) -> None:
    own = set() if adapter == "torch drop-in" else {"of LossScaler"}
    assert ANSWERS[adapter].keys() == MEANINGS.keys() - own


def test_the_answer_is_the_text_of_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^'Bare' object has no attribute 'update'\. `scaler\.step\(grads\)`"):
        Bare().update  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    with pytest.raises(AttributeError, match=r"^'Unlisted' object has no attribute 'update'$"):
        Unlisted().update  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def test_hasattr_copies_and_pickles_are_as_without_it() -> None:
    bare = Bare()
    assert not hasattr(bare, "update")
    assert getattr(bare, "get_scale", 3) == 3
    assert copy.deepcopy(bare).scale == copy.copy(bare).scale == pickle.loads(pickle.dumps(bare)).scale == 1.0


def test_a_property_that_fails_shows_its_own_error() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'missing'$"):
        Bare().loss_scale  # noqa: B018
