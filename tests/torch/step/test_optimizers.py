"""Optimizers of every kind: the gradients they get, by which contract, and errors."""

import copy
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, Wrapper, give, loss_of, poison, same, small_model, weights
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.torch import LossScaler, MasterWeights

pytestmark = pytest.mark.usefixtures("either_way")


class Recorder(torch.optim.SGD):
    """Says that its kernel takes the gate, and writes down what it is handed."""

    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.param_groups[0]["fused"] = True
        self.handed: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> None:
        self.handed.append((self.grad_scale.item(), self.found_inf.item()))


def parameter(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def test_a_kernel_is_handed_the_divisor_and_a_flag_of_0_or_1() -> None:
    weight = parameter()
    optimizer = Recorder([weight])
    scaler = LossScaler(policy=Static(8.0))
    for grad in (1.0, INF):
        give(scaler, [weight], [torch.tensor([grad])])
        scaler.step(optimizer)
        optimizer.zero_grad()
    # In host memory a step that is skipped is not called at all.
    assert optimizer.handed in ([(8.0, 0.0)], [(8.0, 0.0), (8.0, 1.0)])
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_divisor_that_the_user_set_is_multiplied_in() -> None:
    weight = parameter()
    optimizer = Recorder([weight])
    optimizer.grad_scale = torch.tensor(2.0)
    scaler = LossScaler(policy=Static(8.0))
    give(scaler, [weight], [torch.tensor([1.0])])
    scaler.step(optimizer)
    assert optimizer.handed == [(16.0, 0.0)]


def test_a_fused_optimizer_inside_a_wrapper_is_stepped_on_unscaled_gradients() -> None:
    weight = parameter(1.0)
    wrapper: Any = Wrapper(torch.optim.SGD([weight], lr=1.0, fused=True))
    scaler = LossScaler(policy=Static(8.0))
    for grad in (INF, 4.0):
        give(scaler, [weight], [torch.tensor([grad])])
        scaler.step(wrapper)
        wrapper.zero_grad()
    assert weight.item() == 0.5


@pytest.mark.parametrize("policy", [Static(8.0), NoScaling()])
def test_a_bound_on_elements_is_not_rounded_to_the_default_type(policy: Policy) -> None:
    weight = parameter()
    scaler = LossScaler(policy=policy)
    torch.set_default_dtype(torch.bfloat16)
    try:
        give(scaler, [weight], [torch.tensor([80.0], dtype=torch.float32)])
        scaler.step(torch.optim.SGD([weight], lr=1.0), clip_value=0.3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.item() == -torch.tensor(0.3).item()


def test_an_optimizer_with_a_scaler_argument_is_stepped_on_unscaled_gradients() -> None:
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            assert grad_scaler is None
            super().step(closure)

    weight = parameter()
    scaler = LossScaler(policy=Static(8.0))
    give(scaler, [weight], [torch.tensor([16.0])])
    scaler.step(Older([weight], lr=1.0))
    assert weight.item() == -2.0


@pytest.mark.parametrize("bad", [None, INF])
@pytest.mark.parametrize("fused", [(True, True), (True, False), (False, True), (False, False)])
def test_a_parameter_of_two_optimizers_is_divided_once(fused: tuple[bool, bool], bad: float | None) -> None:
    weight = parameter()
    optimizers = [torch.optim.SGD([weight], lr=1.0, fused=fuse) for fuse in fused]
    scaler = LossScaler(policy=Static(8.0))
    give(scaler, [weight], [torch.tensor([16.0 if bad is None else bad])])
    scaler.step(*optimizers)
    assert weight.item() == (-4.0 if bad is None else 0.0)


def test_groups_that_are_not_fused_are_not_handed_the_gate() -> None:
    first, second = parameter(), parameter()
    optimizer = torch.optim.Adam([first], lr=0.1, fused=True)
    optimizer.add_param_group({"params": [second], "fused": False})
    scaler = LossScaler(policy=Static(8.0))
    for bad in (True, False):
        give(scaler, [first, second], [torch.tensor([INF if bad else 8.0]), torch.tensor([8.0])])
        assert scaler.step(optimizer).skipped() is bad
        optimizer.zero_grad()
    assert first.item() == second.item() == pytest.approx(-0.1)


def test_groups_that_are_added_later_are_scaled_checked_and_named() -> None:
    model, head = small_model(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler([model, head], Dynamic(init_scale=256.0))
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": head.parameters(), "lr": 1.0})
    scaler.backward(head(model(torch.ones(1, 4))).sum())
    poison(head.weight)
    assert [culprit.name for culprit in scaler.step(optimizer).culprits()] == ["1.weight"]


def test_parameters_that_were_replaced_are_named_by_the_module_as_it_is_now() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    scaler = LossScaler(model, Dynamic())
    model[1] = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scaler.backward(model(torch.ones(1, 4)).sum())
    poison(model[1].bias)
    assert [culprit.name for culprit in scaler.step(optimizer).culprits()] == ["1.bias"]


def test_parameters_no_module_knows_are_named_by_the_optimizer() -> None:
    named, unnamed = parameter(), parameter()
    for optimizer, name in (
        (torch.optim.SGD([("embedding", named)]), "embedding"),
        (torch.optim.SGD([{"params": [parameter()]}, {"params": [unnamed]}]), "param_groups[1].params[0]"),
    ):
        scaler = LossScaler(policy=Dynamic())
        give(scaler, [named, unnamed], [torch.tensor([INF]), torch.tensor([INF])])
        assert [culprit.name for culprit in scaler.step(optimizer).culprits()] == [name]


def test_an_optimizer_that_raises_leaves_the_scale_and_says_what_to_clear() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError("broken")

    model = small_model()
    scaler = LossScaler(model, Dynamic(init_scale=256.0, growth_interval=1))
    saved = scaler.state_dict()
    before = weights(model)
    scaler.backward(loss_of(model))
    with pytest.raises(ZeroDivisionError, match="broken"):
        scaler.step(Broken(model.parameters()))
    assert scaler.state_dict() == saved
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        scaler.step(optimizer)
    assert same(weights(model), before)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((), TypeError, r"`step` takes at least one optimizer\. Received: none\."),
        (("adam",), TypeError, r"`step` takes optimizers\. Received: str\. Pass several as `step\(a, b\)`"),
        (([],), TypeError, r"Received: list\. Pass several as `step\(a, b\)`"),
        ((lambda: None,), TypeError, r"Received: function\..*optimizer\.step\(scaler\.closure\("),
    ],
)
def test_what_is_no_optimizer_is_refused(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LossScaler().step(*arguments)


def test_an_optimizer_given_twice_is_refused() -> None:
    optimizer = torch.optim.SGD([parameter()])
    with pytest.raises(ValueError, match="takes each optimizer once"):
        LossScaler().step(optimizer, optimizer)


def test_lbfgs_is_sent_to_the_closure() -> None:
    with pytest.raises(TypeError, match=r"LBFGS evaluates the loss itself\. Call `optimizer\.step\(scaler\.closure"):
        LossScaler().step(torch.optim.LBFGS([parameter()]))


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize(
    ("bound", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), (True, TypeError), ("1", TypeError)],
)
def test_a_bound_that_is_no_positive_number_is_refused(name: str, bound: Any, error: type[Exception]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model)
    scaler.backward(loss_of(model))
    with pytest.raises(error, match=rf"`{name}` must be .*Received: {name}="):
        scaler.step(optimizer, **{name: bound})
    assert not scaler.step(optimizer).skipped()


def clipped_norm(grads: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])))


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_after_a_step_are_unscaled_and_clipped(fused: bool) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = LossScaler(model, Static(4096.0))
    scaler.backward(loss_of(model))
    scaler.step(optimizer, clip_norm=0.25)
    assert clipped_norm([p.grad for p in model.parameters() if p.grad is not None]) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("policy", [Dynamic(), NoScaling()])
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
def test_an_optimizer_may_have_no_parameters_yet(policy: Policy, arguments: dict[str, Any]) -> None:
    empty = torch.optim.SGD([{"params": []}], lr=1.0)
    model = small_model()
    scaler = LossScaler(policy=policy)
    scaler.backward(loss_of(model))
    scaler.step(empty, **arguments)
    model.zero_grad()
    empty.add_param_group({"params": list(model.parameters())})
    before = weights(model)
    scaler.backward(loss_of(model))
    assert not scaler.step(empty, **arguments).skipped()
    assert not same(weights(model), before)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, MasterWeights], ids=["as it is", "in MasterWeights"])
def test_a_copied_fused_sgd_takes_a_first_gradient_that_comes_later_than_others(wrap: Any) -> None:
    parameters = nn.ParameterDict({"early": torch.zeros(1), "late": torch.zeros(1)})
    optimizer = wrap(torch.optim.SGD(parameters.values(), lr=1.0, momentum=0.5, fused=True))
    scaler = LossScaler(policy=Static(4.0))
    give(scaler, [parameters["early"]], [torch.tensor([INF])])
    assert scaler.step(optimizer).skipped()
    parameters, optimizer, scaler = copy.deepcopy((parameters, optimizer, scaler))
    give(scaler, [parameters["early"], parameters["late"]], [torch.tensor([4.0]), torch.tensor([8.0])])
    assert not scaler.step(optimizer).skipped()
    assert (parameters["early"].item(), parameters["late"].item()) == (-1.0, -2.0)
