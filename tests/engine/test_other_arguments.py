"""Settings of the scale as arguments of a scaler: the policy that has them."""

import inspect
from typing import Any

import pytest

import gradscale
from gradscale import Dynamic, Headroom, NoScaling, Static
from gradscale.engine.other_arguments import OTHER_SETTINGS, explains_settings


@explains_settings("made(model, policy={})")
def made(model: Any = None, policy: Any = "auto", *, initial_scale: float = 1.0, **kwargs: Any) -> tuple[Any, ...]:
    """Returns what it was given."""
    return model, policy, initial_scale, kwargs


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"init_scale": 1024.0}, Dynamic(init_scale=1024.0)),
        ({"growth_factor": 4, "backoff_factor": 0.25}, Dynamic(growth_factor=4, backoff_factor=0.25)),
        ({"growth_interval": 100, "enabled": True}, Dynamic(growth_interval=100)),
        ({"enabled": False, "init_scale": 8.0}, NoScaling()),
        ({"loss_scale": "dynamic"}, Dynamic()),
        ({"loss_scale": 128.0}, Static(128.0)),
        ({"loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12}, Dynamic(2.0**12, growth_interval=500)),
        ({"scale_window": 7, "scale_factor": 4.0, "delayed_shift": 2}, Dynamic(2.0**16, 4.0, 0.5, 7, 2)),
        ({"min_loss_scale": 2.0, "max_loss_scale": 2.0**20}, Dynamic(min_scale=2.0, max_scale=2.0**20)),
        ({"margin_bits": 3}, Headroom(margin_bits=3)),
        ({"margin_bits": 3, "init_scale": 8.0}, Headroom(init_scale=8.0, margin_bits=3)),
    ],
    ids=str,
)
def test_the_error_has_the_call_to_use(given: dict[str, Any], policy: Any) -> None:
    with pytest.raises(TypeError, match=r"^`made` takes the settings of the scale as a policy\. Received: ") as caught:
        made(3, **given)
    text = str(caught.value)
    assert all(f"{name}={value!r}" in text for name, value in given.items())
    call = text.partition("Use `")[2].removesuffix("`.")
    names = {"made": made, "model": 3} | {name: getattr(gradscale, name) for name in gradscale.__all__}
    assert eval(call, names)[:2] == (3, policy)


def test_a_switch_that_is_on_is_to_be_left_out() -> None:
    with pytest.raises(TypeError, match=r"Leave `enabled` out; to switch scaling off use `made\(model, policy=NoScal"):
        made(enabled=True)


def test_every_setting_is_one_of_dynamic() -> None:
    assert set(OTHER_SETTINGS.values()) == set(inspect.signature(Dynamic).parameters)


def test_arguments_that_the_function_has_and_those_that_nobody_knows_are_passed_on() -> None:
    assert made(1, "dynamic", initial_scale=2.0, other=3) == (1, "dynamic", 2.0, {"other": 3})
    assert list(inspect.signature(made).parameters) == ["model", "policy", "initial_scale", "kwargs"]
