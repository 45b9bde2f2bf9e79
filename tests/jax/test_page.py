"""The code on the page about JAX runs as it stands, from top to bottom."""

from tests.pages import run_page


def test_the_code_on_the_page_runs() -> None:
    run_page("use/jax.md", least=10)
