"""The code on the page about Keras runs as it stands, from top to bottom; that of another backend is left out."""

import re
from collections.abc import Iterator

import keras
import pytest
from tests.keras.backend.helpers import BACKEND
from tests.pages import run_page

IMPORTED = re.compile(r"^import (tensorflow|jax|torch)\b", re.MULTILINE)


@pytest.fixture(autouse=True)
def _policy_as_before() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def test_the_code_on_the_page_runs() -> None:
    run_page("use/keras.md", least=9, wanted=lambda code: set(IMPORTED.findall(code)) <= {BACKEND})
