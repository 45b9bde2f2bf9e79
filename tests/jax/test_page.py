"""The code on the page about JAX runs as it stands, from top to bottom."""

from importlib.util import find_spec

from tests.pages import run_page


def test_the_code_on_the_page_runs() -> None:
    def wanted(code: str) -> bool:
        return "gradscale.jax.flax" not in code or find_spec("flax") is not None

    run_page("use/jax.md", least=11 if find_spec("flax") else 10, wanted=wanted)
