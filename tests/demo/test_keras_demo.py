"""The demo in Keras, on the first backend that is installed: its runs, and the program."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.demo import FRAMEWORKS, load_demo
from tests.demo.five_recipes import FiveRecipes, compared

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

# Keras is not imported before this, so that it runs on the backend that the demo chooses.
from examples.demo import with_keras

keras: Any = sys.modules["keras"]

# Keras 3.15 converts tensors in a way that numpy 2 frowns upon.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.mark.slow
class TestKeras(FiveRecipes):
    framework, model, score, lost = "keras", "autoencoder", "accuracy", 0.4


def test_keras_comes_before_numpy_which_is_always_there() -> None:
    assert "keras" in FRAMEWORKS
    assert list(FRAMEWORKS)[-1] == "numpy"


def test_the_chosen_backend_is_taken_and_the_environment_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    assert with_keras.import_keras() == keras.config.backend()
    assert "KERAS_BACKEND" not in os.environ


def test_no_backend_at_all_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setattr(with_keras, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Keras runs on one of torch, jax, tensorflow\. Received none that is i"):
        with_keras.import_keras()


def test_a_backend_that_cannot_train_is_reported_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--framework", "keras", "--out", str(tmp_path)]
    shown = subprocess.run(command, env=os.environ | {"KERAS_BACKEND": "numpy"}, capture_output=True, text=True)
    assert shown.returncode == 2
    assert shown.stderr.splitlines()[-1] == (
        "python -m examples.demo: error: "
        "Keras must run on one of torch, jax, tensorflow. Received: numpy. Set KERAS_BACKEND."
    )


@pytest.mark.slow
def test_unscaled_fp16_fails_where_fp32_and_scaled_fp16_learn() -> None:
    runs = compared("keras", load_demo("keras").steps["autoencoder"])
    accuracy = [run.scores["accuracy"] for run in runs]
    assert accuracy[1] < 0.2
    assert min(accuracy[0], *accuracy[2:]) > 0.85
    assert max(accuracy[2:]) - accuracy[0] == pytest.approx(0, abs=0.03)
    errors = [run.scores["pixel error"] for run in runs]
    assert np.max(errors) < 1.3 * np.min(errors)  # nothing but the classifier shows that something is wrong
