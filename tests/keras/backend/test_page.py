"""The code on the pages about Keras runs as it stands, from top to bottom; that of another backend is left out."""

import re
from collections.abc import Iterator

import keras
import pytest
from tests.keras.backend.helpers import BACKEND
from tests.pages.pages import pages_with, run_page

IMPORTED = re.compile(r"^import (tensorflow|jax|torch)\b", re.MULTILINE)


@pytest.fixture(autouse=True)
def _policy_as_before() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("page", pages_with("keras"))
def test_the_code_on_the_page_runs(page: str) -> None:
    run_page(page, wanted=lambda code: set(IMPORTED.findall(code)) <= {BACKEND})
