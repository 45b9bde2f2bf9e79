"""What an import says when the package behind it is missing."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradscale._extras import MissingExtra, how_to_install, require

SOURCE = Path(__file__).parents[1] / "src" / "gradscale"


def error_of(module: str, *missing: str, backend: str = "tensorflow") -> str:
    """Returns the last line of the traceback of an import in an interpreter where some packages are missing."""
    code = (
        f"import os, sys\nos.environ['KERAS_BACKEND'] = {backend!r}\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\nimport {module}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


def test_what_is_installed_is_enough() -> None:
    require("This test", "numpy", "pytest", extra="nothing")


def test_a_stand_in_that_is_loaded_counts_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "no_such_package", type(sys)("no_such_package"))
    require("This test", "no_such_package", extra="nothing")


def test_what_is_missing_is_named_with_the_extra_that_installs_it() -> None:
    with pytest.raises(MissingExtra) as caught:
        require("This test", "numpy", "no_such", "nor_this", extra="jax")
    assert str(caught.value) == (
        'This test needs no_such, nor_this, which are not installed. Run: pip install "gradscale[jax]"'
    )
    assert caught.value.name == "no_such"
    assert isinstance(caught.value, ModuleNotFoundError)


def test_without_an_extra_the_package_itself_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"needs no_such, which is not installed\. Run: pip install no_such$"):
        require("This test", "no_such")


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("gradscale.torch", "torch", "torch"),
        ("gradscale.torch.masters", "torch", "torch"),
        ("gradscale.jax", "jax", "jax"),
        ("gradscale.jax", "optax", "jax"),
        ("gradscale.keras", "keras", "keras"),
        ("gradscale.mxnet", "mxnet", "mxnet"),
        ("gradscale.integrations.lightning", "lightning", "lightning"),
        ("gradscale.integrations.accelerate", "accelerate", "accelerate"),
        ("gradscale.integrations.transformers", "transformers", "transformers"),
        ("gradscale.cli", "typer", "cli"),
        ("gradscale.cli", "rich", "cli"),
    ],
)
def test_an_import_without_its_package_names_the_extra(module: str, missing: str, extra: str) -> None:
    if missing == "optax" and find_spec("jax") is None:
        pytest.skip("JAX is not installed, and would be named as well")
    error = error_of(module, missing)
    user = "The command line" if extra == "cli" else ".".join(module.split(".")[: 3 if "integrations" in module else 2])
    assert error.endswith(f"MissingExtra: {user} needs {missing}, which is not installed. Run: {how_to_install(extra)}")
    assert f"gradscale[{extra}" in how_to_install(extra)


def test_the_drop_in_for_flax_names_flax() -> None:
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    assert error_of("gradscale.jax.flax", "flax").endswith(
        "gradscale.jax.flax needs flax, which is not installed. Run: pip install flax"
    )


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_keras_without_its_backend_names_one_that_is_installed(backend: str) -> None:
    if find_spec("keras") is None:  # importing it here would choose a backend for other tests
        pytest.skip("Keras is not installed")
    error = error_of("gradscale.keras", backend, backend=backend)
    assert f"Keras needs a backend, and the one it is to use, {backend}, is not installed." in error
    here = [name for name in ("tensorflow", "jax", "torch") if name != backend and find_spec(name) is not None]
    assert f"Set KERAS_BACKEND={here[-1]}, which is installed." in error


def test_only_the_command_line_imports_its_packages() -> None:
    importing = re.compile(r"^\s*(?:import|from) (?:typer|rich|packaging)\b", re.MULTILINE)
    found = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py") if importing.search(path.read_text())}
    assert found == {"cli"}
