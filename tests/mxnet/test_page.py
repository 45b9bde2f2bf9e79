"""The code on the pages about MXNet runs as it stands, from top to bottom."""

import pytest
from tests.pages.pages import pages_with, run_page


@pytest.mark.parametrize("page", pages_with("mxnet"))
def test_the_code_on_the_page_runs(page: str) -> None:
    run_page(page)
