"""The page about other systems leaves nothing out."""

import inspect
import re
from pathlib import Path

import pytest

from gradscale.peers import PEERS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "peers.md").read_text()
ELIDED = {
    "auto_cast",
    "fp16_master_weights_and_grads",
    "binEdgeLocation",
    "toTrackTensors",
    "gradientTensorTrackingMethod",
    "clipOutput",
    "drop_overflow_update",
}
"""Keywords that make no difference to the rule, or hardly ever; the page has dots for them."""


@pytest.mark.parametrize("system", PEERS)
def test_every_system_and_variant_is_on_the_page(system: str) -> None:
    assert f"| `{system}`" in PAGE
    for variant in PEERS[system].variants:
        assert variant.rsplit(".", 1)[-1] in PAGE, variant


@pytest.mark.parametrize("system", PEERS)
def test_every_keyword_is_on_the_page(system: str) -> None:
    keywords = {name for builder in PEERS[system].variants.values() for name in inspect.signature(builder).parameters}
    assert {name for name in keywords if not re.search(rf"`{name}[`=]", PAGE)} <= ELIDED
