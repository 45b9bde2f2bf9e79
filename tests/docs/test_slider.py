"""The page with the slider, in a real browser: its numbers are those of `gradscale.histogram`."""

import math
from pathlib import Path

import pytest
from docs.data.recorded import load, recorded_histograms
from tests.docs.browser import Page

from gradscale.formats import get_format
from gradscale.histogram import best_static_scale, lost_share, overflow_share, subnormal_share

HISTOGRAMS = recorded_histograms()

pytestmark = pytest.mark.slow  # the site is built


@pytest.fixture
def slider(page: Page, site: Path) -> Page:
    page.open(site / "learn" / "slider.html")
    page.wait("document.querySelector('#scale-lost').textContent !== ''")
    return page


def choose(page: Page, name: str, value: object) -> None:
    """Sets a control and reports it as the browser does when a user has changed it."""
    page.run(
        f"(() => {{ const control = document.querySelector('#scale-{name}'); control.value = {str(value)!r};"
        "control.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def shown(page: Page, name: str) -> float:
    return float(page.run(f"document.querySelector('#scale-{name}').dataset.share"))


def text(page: Page, name: str) -> str:
    return page.run(f"document.querySelector('#scale-{name}').textContent")


@pytest.mark.parametrize("format", load("histograms")["formats"])
def test_shares_equal_those_of_the_library_at_every_scale(slider: Page, format: str) -> None:
    choose(slider, "format", format)
    for index, histogram in enumerate(HISTOGRAMS.values()):
        choose(slider, "histogram", index)
        for exponent in (0, 1, 8, 13, 17, 24, 31, 32):
            choose(slider, "exponent", exponent)
            shares = {
                "lost": lost_share(histogram, format, 2.0**exponent),
                "subnormal": subnormal_share(histogram, format, 2.0**exponent),
                "overflow": overflow_share(histogram, format, 2.0**exponent),
            }
            assert {name: shown(slider, name) for name in shares} == pytest.approx(shares, rel=1e-9, abs=1e-15)
            assert shown(slider, "normal") == pytest.approx(1 - sum(shares.values()), abs=1e-12)


def test_the_shares_are_shown_as_percentages(slider: Page) -> None:
    assert text(slider, "value") == "2^0 = 1"
    histogram = next(iter(HISTOGRAMS.values()))
    assert text(slider, "lost") == f"{lost_share(histogram, 'fp16'):.1%}"
    assert text(slider, "subnormal") == f"{subnormal_share(histogram, 'fp16'):.1%}"
    assert text(slider, "overflow") == "0%"


@pytest.mark.parametrize("format", load("histograms")["formats"])
def test_the_button_sets_the_best_static_scale_of_the_library(slider: Page, format: str) -> None:
    choose(slider, "format", format)
    for index, histogram in enumerate(HISTOGRAMS.values()):
        choose(slider, "histogram", index)
        exponent = math.log2(best_static_scale(histogram, format))
        assert text(slider, "best") == f"Best static scale: 2^{exponent:.0f}"
        slider.run("document.querySelector('#scale-best').click()")
        assert slider.run("Number(document.querySelector('#scale-exponent').value)") == min(exponent, 32)


def test_the_scale_moves_by_the_keyboard_and_is_spoken(slider: Page) -> None:
    slider.run("document.querySelector('#scale-exponent').focus()")
    slider.press("ArrowRight", 39)
    assert text(slider, "value") == "2^1 = 2"
    assert slider.run("document.querySelector('#scale-exponent').ariaValueText") == "2 to the power of 1"
    assert "become zero" in slider.run("document.querySelector('#scale-picture').ariaLabel")


def test_bars_move_right_with_the_scale(slider: Page) -> None:
    first_bar = "document.querySelector('#scale-picture .lost, #scale-picture .normal').x.baseVal.value"
    before = slider.run(first_bar)
    choose(slider, "exponent", 8)
    assert slider.run(first_bar) > before


def test_the_page_fits_a_phone(slider: Page) -> None:
    slider.resize(390, 844)
    try:
        slider.wait("document.querySelector('#scale-picture').clientWidth <= 390")
        assert slider.run("document.documentElement.scrollWidth") <= 390
    finally:
        slider.resize(1280, 900)


def test_the_limits_in_the_recorded_file_are_those_of_the_formats() -> None:
    for name, limits in load("histograms")["formats"].items():
        assert limits == {limit: getattr(get_format(name), limit) for limit in limits}
