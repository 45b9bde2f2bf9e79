"""Versions of Keras: what is refused because one lacks it, whichever version is installed."""

import runpy
from typing import Any

import keras
import pytest
from keras.optimizers import SGD
from tests.keras.backend.helpers import host, tensors, variables

from gradscale.engine.result import Status
from gradscale.keras import LossScaleOptimizer, compat

DEFAULTS_BEFORE_3_12 = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""What the config of Keras's own class has, besides its own settings, in files of Keras before 3.12."""


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0", "3.8.0", "3.8.0.dev2025010203"])
def test_a_keras_that_is_too_old_is_refused_at_the_import(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", version)
    with pytest.raises(ImportError, match=rf"needs keras 3\.9 or newer\. Received: keras {version}\. .*pip install -U"):
        runpy.run_path(compat.__file__)


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0", "3.16.0.dev2026010203", "4.0"])
def test_a_keras_from_the_lowest_on_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", version)
    runpy.run_path(compat.__file__)


def test_a_step_that_only_overwrites_variables_is_refused_where_keras_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "STEPS_WITHOUT_GRADIENTS", False)
    models = variables([1.0], [2.0])
    models[0].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(SGD(1.0), 8.0)
    optimizer.build(models)
    with pytest.raises(ValueError, match=r"unless Keras is 3\.10 or newer\. Received: only such gradients, with keras"):
        optimizer.apply_if_finite(tensors([3.0], None), models)
    assert host(models[0]).tolist() == [1.0]
    assert optimizer.apply_if_finite(tensors(None, None), models).status() is Status.NO_GRADS
    assert optimizer.apply_if_finite(tensors([3.0], [8.0]), models).status() is Status.APPLIED
    assert [host(model).tolist() for model in models] == [[3.0], [1.0]]


@pytest.mark.parametrize("setting", [{"clipnorm": 1.0}, {"use_ema": True}, {"learning_rate": 0.1}])
def test_settings_of_the_inner_optimizer_are_refused_on_every_version(setting: dict[str, Any]) -> None:
    (name,) = setting
    # Keras's own words at the end: programs look for them.
    text = rf"belong to the inner optimizer\. Received: {name}=.*\. Instead, set `{name}` on the `inner_optimizer`\."
    with pytest.raises(ValueError, match=text):
        LossScaleOptimizer(SGD(), **setting)


def test_a_config_that_an_older_keras_wrote_is_read() -> None:
    config = LossScaleOptimizer(SGD(0.5), 64.0, name="mine").get_config() | DEFAULTS_BEFORE_3_12
    read = LossScaleOptimizer.from_config(config)
    assert (read.name, float(read.state.scale)) == ("mine", 64.0)
