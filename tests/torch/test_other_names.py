"""What users of other loss scalers type, and what PyTorch's two scalers answer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.other_names import check_answers
from tests.torch.helpers import small_model
from torch import nn

from gradscale import Dynamic, Headroom, NoScaling, Static
from gradscale.torch import GradScaler, LossScaler, ShardedGradScaler


@pytest.mark.parametrize("adapter", ["torch", "torch drop-in"])
def test_names_of_other_scalers_are_answered_with_what_to_use(adapter: str) -> None:
    scaler = LossScaler(small_model()) if adapter == "torch" else GradScaler("cpu")
    check_answers(scaler, adapter)
    assert repr(copy.deepcopy(scaler)) == repr(pickle.loads(pickle.dumps(scaler))) == repr(scaler)


def test_a_loop_of_torchs_scaler_reads_what_to_change() -> None:
    scaler: Any = LossScaler(small_model())
    with pytest.raises(AttributeError, match=r"'update'\. `scaler\.step\(optimizer\)` updates the scale as well\. Rem"):
        scaler.update()
    with pytest.raises(AttributeError, match=r"'unscale_'\. .* use `with scaler\.unscaled\(optimizer\):`"):
        scaler.unscale_(None)
    with pytest.raises(AttributeError, match=r"'get_scale'\. Use `scaler\.loss_scale`"):
        scaler.get_scale()


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ([], {"init_scale": 8.0}, r"Use `LossScaler\(model, policy=Dynamic\(init_scale=8\.0\)\)`"),
        (["cuda"], {}, r"Received: 'cuda'\. Give a device by name, as `LossScaler\(model, device='cuda'\)`"),
        ([torch.device("cpu")], {}, r"as `LossScaler\(model, device='cpu'\)`, or leave it out"),
        ([OPTIMIZER], {}, r"Received: SGD\. `scaler\.step\(optimizer\)` takes the optimizer"),
        ([8.0], {}, r"Received: 8\.0\. Give a first scale as `LossScaler\(model, policy=Dynamic\(init_scale=8\.0\)\)`"),
        (["dynamic"], {}, r"Received: 'dynamic'\. Pass a policy as `policy=\.\.\.`"),
        ([None, 8.0], {}, r"For a fixed scale use `Static\(8\.0\)`, for a first one `Dynamic\(init_scale=8\.0\)`"),
    ],
    ids=str,
)
def test_arguments_of_other_scalers_are_answered_with_the_right_call(
    arguments: list[Any], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        LossScaler(*arguments, **settings)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (OPTIMIZER, r"`scaler\.step\(optimizer\)` takes the optimizer"),
        (nn.Linear(1, 1), r"Received: Linear.* use `gradscale\.torch\.LossScaler\(model\)`"),
        (8.0, r"Received: 8\.0\. Give a scale by name, as `init_scale=8\.0`"),
        (Dynamic(), r"Give a policy by name, as `policy=\.\.\.`"),
        (None, r"Received: None\. Leave it out"),
    ],
    ids=["optimizer", "model", "number", "policy", "none"],
)
def test_the_drop_in_refuses_what_is_no_device_where_torch_ignores_it(first: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"`device`, the first argument of `GradScaler`, must be .*{text}"):
        GradScaler(first)


def test_arguments_of_other_steps_and_misspelt_ones_are_answered() -> None:
    scaler: Any = LossScaler(small_model())
    with pytest.raises(TypeError, match=r"^`scaler\.step` has no argument 'max_norm'\. .* Use `clip_norm=1\.0`\.$"):
        scaler.step(OPTIMIZER, max_norm=1.0)
    with pytest.raises(TypeError, match=r"^`LossScaler` has no argument 'policyy'\. .* Did you mean 'policy'\?$"):
        LossScaler(small_model(), policyy="dynamic")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"initial_scale": 8.0}, r"Use `init_scale=8\.0`\."),
        ({"scale_window": 500}, r"Use `growth_interval=500`\."),
        ({"min_loss_scale": 1.0}, r"Use `min_scale=1\.0`\."),
        ({"growth_intervall": 500}, r"Did you mean 'growth_interval'\?"),
    ],
)
def test_drop_in_answers_keywords_of_other_constructors_and_misspelt_ones(given: Any, hint: str, kind: Any) -> None:
    name, value = next(iter(given.items()))
    text = rf"^`{kind.__name__}` has no argument '{name}'\. Received: {name}={value}\. {hint}$"
    with pytest.raises(TypeError, match=text):
        kind("cpu", **given)


class Clipping(torch.optim.SGD):
    """An optimizer whose `step` clips."""

    def step(self, closure: Any = None, *, max_norm: float = 0.0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return max_norm


def test_drop_in_says_how_to_clip_before_anything_is_changed() -> None:
    owner = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([owner], lr=1.0), GradScaler("cpu", init_scale=8.0)
    scaler.scale(owner.sum()).backward()
    text = (
        r"which has no argument 'max_norm'\. Received: max_norm=1\.0\. Use `scaler\.step\(optimizer, clip_norm=1\.0\)`"
    )
    with pytest.raises(TypeError, match=text):
        scaler.step(optimizer, max_norm=1.0)
    assert owner.grad is not None
    assert owner.grad.item() == 8.0
    scaler.step(optimizer)
    assert owner.item() == 0.0
    scaler.scale(owner.sum()).backward()
    assert scaler.step(Clipping([owner], lr=1.0), max_norm=2.0) == 2.0


def test_policies_can_be_named_as_on_the_command_line() -> None:
    assert LossScaler(policy="dynamic:growth_interval=400").policy == Dynamic(growth_interval=400)
    assert LossScaler(policy="auto").policy == LossScaler().policy == Headroom()
    assert LossScaler(policy="static:1024").policy == Static(1024)
    assert LossScaler(policy="none").policy == NoScaling()
    assert GradScaler("cpu", policy="dynamic:growth_interval=400").get_growth_interval() == 400
    with pytest.raises(ValueError, match=r"Received: policy='dynamc': .* Did you mean 'dynamic'\?"):
        GradScaler("cpu", policy="dynamc")


def test_parameters_and_classes_are_no_model() -> None:
    with pytest.raises(TypeError, match=r"Received: generator\. Give the module itself, not its parameters\."):
        LossScaler(nn.Linear(1, 1).parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"This is a class: give a module that was made of it\."):
        LossScaler(nn.Linear)  # type: ignore[arg-type]
