"""The examples of the page about other systems, and that it leaves nothing out."""

import doctest
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


def test_the_examples_give_what_the_page_says() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    assert code.count(">>>") > 20
    examples = doctest.DocTestParser().get_doctest(code, {}, "peers.md", "docs/reference/peers.md", 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.DocTestRunner(optionflags=flags).run(examples).failed == 0


@pytest.mark.parametrize("system", PEERS)
def test_every_system_and_variant_is_on_the_page(system: str) -> None:
    assert f"| `{system}`" in PAGE
    for variant in PEERS[system].variants:
        assert variant.rsplit(".", 1)[-1] in PAGE, variant


@pytest.mark.parametrize("system", PEERS)
def test_every_keyword_is_on_the_page(system: str) -> None:
    keywords = {name for builder in PEERS[system].variants.values() for name in inspect.signature(builder).parameters}
    assert {name for name in keywords if not re.search(rf"`{name}[`=]", PAGE)} <= ELIDED
