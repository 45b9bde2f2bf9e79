"""The documentation, built once, and a browser to read it with."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.browser import Page, browser, chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the built site. The API reference, which takes the most time, is left out."""
    pytest.importorskip("material", reason="needs mkdocs-material: pip install --group docs")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # silences a notice of the theme's
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    del config.plugins["mkdocstrings"]
    logging.getLogger("mkdocs").setLevel(logging.ERROR)  # links into the API reference, which is not there
    build(config)
    return folder


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if chromium() is None:
        pytest.skip("needs a browser: install chromium, or set CHROMIUM to its path")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
