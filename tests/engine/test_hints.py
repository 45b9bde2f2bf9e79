"""Names of other loss scalers: on a class that has none of them, as settings of a policy and as arguments."""

import copy
import inspect
import pickle
from typing import Any, ClassVar

import pytest

import gradscale
from gradscale import Dynamic, Headroom, NoScaling, Static
from gradscale.engine.hints import ANSWERS, MEANINGS, OTHER_ARGUMENTS, OTHER_SETTINGS, OtherNames, explains_arguments
from gradscale.numpy import LossScaler


class Bare(OtherNames):
    _adapter: ClassVar[str] = "numpy"

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def loss_scale(self) -> float:
        return self.missing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class Unlisted(OtherNames):
    pass


def test_a_name_means_one_thing() -> None:
    names = [name for each in MEANINGS.values() for name in each]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("adapter", ANSWERS)
def test_every_adapter_answers_every_meaning(adapter: str) -> None:
    own = set() if adapter == "torch drop-in" else {"of LossScaler"}
    assert ANSWERS[adapter].keys() == MEANINGS.keys() - own


def test_the_answer_is_the_text_of_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^'Bare' object has no attribute 'update'\. `scaler\.step\(grads\)`"):
        Bare().update  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    with pytest.raises(AttributeError, match=r"^'Unlisted' object has no attribute 'update'$"):
        Unlisted().update  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def test_hasattr_copies_and_pickles_are_as_without_it() -> None:
    bare = Bare()
    assert not hasattr(bare, "update")
    assert getattr(bare, "get_scale", 3) == 3
    assert copy.deepcopy(bare).scale == copy.copy(bare).scale == pickle.loads(pickle.dumps(bare)).scale == 1.0


def test_a_property_that_fails_shows_its_own_error() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'missing'$"):
        Bare().loss_scale  # noqa: B018


@explains_arguments("made(model, policy={})")
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


@explains_arguments("scaler.step")
def step(*optimizers: Any, clip_norm: Any = None, clip_value: Any = None, norm: bool = False) -> tuple[Any, ...]:
    """Returns what it was given."""
    return (*optimizers, clip_norm, clip_value, norm)


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_an_argument_of_another_step_is_answered_with_that_of_this_one(name: str) -> None:
    text = rf"^`scaler\.step` has no argument '{name}'\. Received: {name}=1\.5\. Use `{OTHER_ARGUMENTS[name]}=1\.5`\.$"
    with pytest.raises(TypeError, match=text):
        step(**{name: 1.5})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "meant"), [("clip_nrom", "clip_norm"), ("clp_value", "clip_value"), ("nrm", "norm")])
def test_a_misspelt_argument_is_answered_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"has no argument '{name}'\. Received: {name}=3\. Did you mean '{meant}'\?$"):
        step(**{name: 3})  # pyright: ignore[reportArgumentType]


def test_arguments_that_nobody_knows_are_refused_by_the_function() -> None:
    for name in ("xyz", "optimizer", "optimizers", "self"):
        with pytest.raises(TypeError, match=rf"^step\(\) got an unexpected keyword argument '{name}'"):
            step(**{name: 3})  # pyright: ignore[reportArgumentType]
    assert step(1, 2, clip_norm=3.0) == (1, 2, 3.0, None, False)


def test_constructors_and_steps_answer_misspelt_arguments() -> None:
    with pytest.raises(TypeError, match=r"^`LossScaler` has no argument 'on_stuk'\. .* Did you mean 'on_stuck'\?$"):
        LossScaler(on_stuk="warn")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"Use `clip_norm=1\.0`\.$"):
        LossScaler().step([], max_norm=1.0)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
