"""`closure`: optimizers that evaluate the loss themselves, LBFGS and SAM, in mixed precision."""

from typing import Any

import pytest
import torch
from tests.torch.helpers import NAN, loss_of, same, small_model, weights
from tests.torch.versions import needs_grad_dtype
from tests.torch.window.test_retry import narrow
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.torch import LossScaler, MasterWeights

pytestmark = pytest.mark.usefixtures("either_way")


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step uphill, and from there the gradient for the step down."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)

    @torch.no_grad()
    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in held]))
        moves = [p.grad * (self.defaults["rho"] / (norm + 1e-12)) for p in held]
        torch._foreach_add_([p.data for p in held], moves)  # pyright: ignore[reportPrivateImportUsage]
        closure()
        torch._foreach_sub_([p.data for p in held], moves)  # pyright: ignore[reportPrivateImportUsage]
        self.base.step()
        return loss


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")


def sam(model: nn.Module) -> torch.optim.Optimizer:
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("build", [lbfgs, sam])
@pytest.mark.parametrize("policy", [Static(1024.0), Dynamic(growth_interval=3)])
def test_weights_are_those_of_plain_float32(build: Any, policy: Policy) -> None:
    def run(policy: Policy) -> tuple[list[Tensor], float]:
        model = small_model()
        optimizer = build(model)
        scaler = LossScaler(model, policy)
        for _ in range(4):
            optimizer.step(scaler.closure(lambda: loss_of(model), optimizer))
        return weights(model), loss_of(model).item()

    found, loss = run(policy)
    expected, _ = run(NoScaling())
    assert same(found, expected)
    assert loss < 0.8 * loss_of(small_model()).item()


def test_weights_without_scaling_are_those_of_a_plain_closure() -> None:
    model, expected = small_model(), small_model()
    scaler = LossScaler(model, NoScaling())
    optimizer, plain = lbfgs(model), lbfgs(expected)

    def closure() -> Any:
        plain.zero_grad()
        loss = loss_of(expected)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(scaler.closure(lambda: loss_of(model), optimizer))
        plain.step(closure)
    assert same(weights(model), weights(expected))


@pytest.mark.parametrize("build", [lbfgs, sam])
def test_an_overflow_is_tried_again_at_a_lower_scale(build: Any) -> None:
    def run(policy: Policy, limit: float) -> list[Tensor]:
        model = small_model()
        optimizer = build(model)
        scaler = LossScaler(model, policy)
        optimizer.step(scaler.closure(lambda: narrow(loss_of(model), limit), optimizer))
        assert scaler.metrics()["skipped"] == 0
        return weights(model)

    assert same(run(Dynamic(init_scale=65536.0), 1024.0), run(Static(1024.0), 1024.0))


@pytest.mark.parametrize("build", [lbfgs, sam])
def test_where_no_scale_helps_the_weights_stay_where_they_are(build: Any) -> None:
    model = small_model()
    before = weights(model)
    optimizer = build(model)
    scaler = LossScaler(model, Dynamic())
    optimizer.step(scaler.closure(lambda: loss_of(model) * NAN, optimizer))
    assert scaler.last is not None
    assert scaler.last.status() == "nonfinite_loss"
    assert same(weights(model), before)


def test_the_optimizer_may_be_left_out_if_the_model_is_known() -> None:
    model = small_model()
    before = loss_of(model).item()
    lbfgs(model).step(LossScaler(model).closure(lambda: loss_of(model)))
    assert loss_of(model).item() < before


def test_modules_of_a_closure_may_share_parameters() -> None:
    model = small_model()
    before = loss_of(model).item()
    lbfgs(model).step(LossScaler([model, model[0]]).closure(lambda: loss_of(model)))
    assert loss_of(model).item() < before


def test_a_closure_without_model_and_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`closure` needs parameters\. Build the scaler as `LossScaler\(model\)`"):
        LossScaler().closure(lambda: torch.zeros(()))


def test_a_closure_leaves_unscaled_gradients_and_returns_the_loss_itself() -> None:
    model = small_model()
    optimizer = lbfgs(model)
    loss = LossScaler(model, Static(1024.0)).closure(lambda: loss_of(model), optimizer)()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    expected = loss_of(model)
    assert loss.item() == expected.item()
    assert not loss.requires_grad
    assert same(found, torch.autograd.grad(expected, list(model.parameters())))


def test_a_closure_works_inside_no_grad() -> None:
    model = small_model()
    with torch.no_grad():
        LossScaler(model, Static(4.0)).closure(lambda: loss_of(model))()
    assert all(parameter.grad is not None for parameter in model.parameters())


def half_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    return model


def test_a_closure_for_masters_with_half_gradients_is_refused() -> None:
    optimizer = MasterWeights(torch.optim.SGD(half_model().parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"`closure` unscales `\.grad` in place.*grad_fp32=True"):
        LossScaler(policy=Static(2.0**15)).closure(lambda: torch.zeros(()), optimizer)


@needs_grad_dtype
def test_a_closure_for_masters_with_float32_gradients_loses_none() -> None:
    model = half_model()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0), grad_fp32=True)
    scaler = LossScaler(model, Static(2.0**15))
    optimizer.step(scaler.closure(lambda: model.weight.float().sum() * 2.0**-26, optimizer))
    ((_, value),) = optimizer.masters()
    assert value.item() == -(2.0**-26)


@needs_grad_dtype
def test_a_closure_leaves_zeros_of_the_gradients_own_type_where_no_scale_helps() -> None:
    model = half_model()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0), grad_fp32=True)
    scaler = LossScaler(model, Dynamic())
    optimizer.step(scaler.closure(lambda: model.weight.float().sum() * NAN, optimizer))
    assert model.weight.item() == 0.0


def test_a_closure_warns_of_half_parameters_without_masters() -> None:
    model = half_model()
    closure = LossScaler(model, Static(4.0)).closure(lambda: model.weight.float().sum())
    with pytest.warns(UserWarning, match="These parameters are FP16: weight"):
        closure()
