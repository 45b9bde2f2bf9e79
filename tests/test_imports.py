"""What importing gradscale loads: no framework, and nothing slow that a user did not ask for."""

import subprocess
import sys

import pytest

FRAMEWORKS = (
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "keras",
    "tensorflow",
    "mxnet",
    "sklearn",
    "matplotlib",
    "plotly",
    "pandas",
    "scipy",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "tensorboard",
    "mlflow",
    "wandb",
)


def loaded_by(code: str) -> set[str]:
    """Returns the top-level modules that a fresh interpreter holds after running `code`."""
    report = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import gradscale",
        "from gradscale import *",
        "import gradscale.peers",
        "import gradscale.replay.run",
        "import gradscale.cli",
    ],
)
def test_importing_loads_no_framework(code: str) -> None:
    if code == "import gradscale.cli":
        pytest.importorskip("typer")
    assert not loaded_by(code) & set(FRAMEWORKS)


def test_importing_gradscale_loads_no_command_line() -> None:
    assert not loaded_by("import gradscale") & {"typer", "rich", "click"}


def test_the_check_can_fail() -> None:
    assert "json" in loaded_by("import json")


def test_everything_named_in_all_is_there() -> None:
    import gradscale

    assert [name for name in gradscale.__all__ if not hasattr(gradscale, name)] == []
    assert len(set(gradscale.__all__)) == len(gradscale.__all__)
