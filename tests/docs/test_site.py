"""The built site, opened from the disk in a real browser: search, navigation, dark mode, and no network."""

import re
from pathlib import Path

import pytest
from tests.docs.browser import Page

pytestmark = pytest.mark.slow  # the site is built


@pytest.fixture
def learn(page: Page, site: Path) -> Page:
    page.requested.clear()
    page.open(site / "learn" / "what_is_loss_scaling.html")
    return page


# The second is in brackets on its page, and the third between a dot and brackets.
@pytest.mark.parametrize(
    ("word", "found_on"), [("hysteresis", "glossary.html"), ("bfloat16", "glossary.html"), ("poll", "faq.html")]
)
def test_search_finds_a_word_without_a_server(learn: Page, word: str, found_on: str) -> None:
    search(learn, word)
    learn.wait(
        f"[...document.querySelectorAll('.md-search-result__link')].some(link => link.href.includes('{found_on}'))"
    )


def test_search_for_gradient_clipping_finds_the_page_about_pytorch_first(learn: Page) -> None:
    search(learn, "gradient clipping")
    learn.wait("document.querySelector('.md-search-result__link')?.href.includes('use/torch.html')")


def search(page: Page, words: str) -> None:
    query = "document.querySelector('.md-search__input')"
    page.run(f"{query}.focus()")
    page.run(f"{query}.value = '{words}'; {query}.dispatchEvent(new Event('keyup', {{ bubbles: true }}))")


def test_no_link_of_a_page_starts_at_the_root_of_the_disk(site: Path) -> None:
    rooted = {path.name: re.findall(r' (?:href|src)="(/[^"]*)"', path.read_text()) for path in site.rglob("*.html")}
    assert len(rooted) > 40
    assert {name: links[:3] for name, links in rooted.items() if links} == {}


def test_the_header_links_to_the_repository(learn: Page) -> None:
    link = "document.querySelector('.md-header .md-source')"
    assert learn.run(f"{link}.href") == "https://github.com/gradscale/gradscale"
    assert "gradscale/gradscale" in learn.run(f"{link}.innerText")
    # By this mark the theme's script finds the link, some time after loading, and asks GitHub for stars and forks.
    assert learn.run("document.querySelectorAll('[data-md-component=source]').length") == 0


def test_a_page_links_to_the_previous_and_the_next(learn: Page) -> None:
    assert learn.run("document.querySelector('.md-footer__link--prev').href").startswith("file:")
    assert learn.run("document.querySelector('.md-footer__link--next').href").endswith("slider.html")


def test_dark_mode_changes_the_colours_and_the_pictures(learn: Page) -> None:
    visible = "[...document.images].filter(each => each.offsetParent).map(each => each.src).join()"
    learn.run("document.querySelector('#__palette_0').click()")
    learn.wait("document.body.dataset.mdColorScheme === 'default'")
    assert "loss_scaling.svg" in learn.run(visible)
    assert "-dark.svg" not in learn.run(visible)
    learn.run("document.querySelector('#__palette_1').click()")
    learn.wait("document.body.dataset.mdColorScheme === 'slate'")
    assert "loss_scaling-dark.svg" in learn.run(visible)
    assert "loss_scaling.svg" not in learn.run(visible)
    learn.run("document.querySelector('#__palette_0').click()")


@pytest.mark.parametrize("name", ["index", "learn/what_is_loss_scaling", "learn/slider", "notebooks/learn"])
def test_pages_fetch_nothing_from_the_network_and_have_all_their_pictures(page: Page, site: Path, name: str) -> None:
    page.requested.clear()
    page.open(site / f"{name}.html")
    page.run("document.querySelectorAll('img').forEach(image => { image.loading = 'eager'; })")
    page.wait("[...document.images].every(image => image.complete)")
    assert [url for url in page.requested if not url.startswith(("file:", "data:", "blob:"))] == []
    broken = "[...document.images].filter(image => image.offsetParent && !image.naturalWidth).map(image => image.src)"
    assert page.run(broken) == []


@pytest.mark.parametrize("name", ["index", "learn/what_is_loss_scaling", "learn/demo", "notebooks/learn"])
def test_every_picture_has_an_alternative_text(page: Page, site: Path, name: str) -> None:
    page.open(site / f"{name}.html")
    assert page.run("[...document.images].filter(image => !image.alt).map(image => image.src)") == []


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "learn/what_is_loss_scaling",
        "learn/slider",
        "learn/glossary",
        "use/torch",
        "understand/research",
        "notebooks/learn",
    ],
)
def test_pages_do_not_scroll_sideways_on_a_phone(page: Page, site: Path, name: str) -> None:
    page.resize(390, 844)
    try:
        page.open(site / f"{name}.html")
        assert page.run("document.documentElement.scrollWidth") <= 390
    finally:
        page.resize(1280, 900)
