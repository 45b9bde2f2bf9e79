"""Under `torch.compile`: a compiled model trains, and forward pass, gradients and their measuring are one graph."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.torch.helpers import loss_of, small_model
from tests.torch.versions import TRACES_AUTOGRAD, needs_traced_autograd
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call, grad_and_value

from gradscale import Dynamic
from gradscale.engine.packed import Packed
from gradscale.kernels.triton.operator import advance, number_of
from gradscale.torch import LossScaler
from gradscale.torch.step.measure import measure_sizes

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of the compiler itself

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
Found = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _compiled_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch({"trace_autograd_ops": True} if TRACES_AUTOGRAD else {}):
        yield
    torch._dynamo.reset()


def by_autograd(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor, *, norm: bool) -> Found:
    loss = nn.functional.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss * scale, list(model.parameters()))
    measured = measure_sizes(grads, scale.device, norm=norm, amax=False, half=True)
    assert measured.sizes is not None
    return loss.detach(), measured.sizes, measured.finite(scale, torch)


def by_transform(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor, *, norm: bool) -> Found:
    # As strings: the compiler of torch 2.6 traces annotations, and not these.
    def scaled(parameters: "dict[str, Tensor]") -> "tuple[Tensor, Tensor]":
        loss = nn.functional.mse_loss(functional_call(model, parameters, (x,)), y)
        return loss * scale, loss

    grads, (_, loss) = grad_and_value(scaled, has_aux=True)(dict(model.named_parameters()))
    measured = measure_sizes(list(grads.values()), scale.device, norm=norm, amax=False, half=True)
    assert measured.sizes is not None
    return loss.detach(), measured.sizes, measured.finite(scale, torch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("way", [pytest.param(by_autograd, marks=needs_traced_autograd), by_transform])
def test_forward_pass_gradients_and_measure_are_one_graph(way: Callable[..., Found], norm: bool, backend: str) -> None:
    model, x, y = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 2)), torch.randn(5, 64), torch.randn(5, 2)
    compiled = torch.compile(way, fullgraph=True, backend=backend)
    for target, is_finite in ((y, True), (y * torch.inf, False)):
        expected = way(model, x, target, torch.tensor(1024.0), norm=norm)
        found = compiled(model, x, target, torch.tensor(1024.0), norm=norm)
        assert bool(found[2]) is bool(expected[2]) is is_finite
        torch.testing.assert_close(found[:2], expected[:2], equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_trains_as_the_same_model_does_uncompiled(backend: str) -> None:
    weights = []
    for compiled in (False, True):
        model = small_model()
        forward = torch.compile(model, backend=backend) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = LossScaler(model, Dynamic())
        for step in range(3):
            scaler.backward(loss_of(forward, step))  # type: ignore[arg-type]
            assert not scaler.step(optimizer, clip_norm=0.05).skipped()
            optimizer.zero_grad()
        weights.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*weights)


def trained_inside(compile: Callable[..., Any], inside: str) -> list[Tensor]:
    """Returns the weights after three steps in which the scaler is called inside a function that `compile` is given."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(growth_interval=1))

    def scaled(x: Tensor) -> Tensor:
        return scaler.scale(model(x).square().mean())

    def update(x: Tensor) -> None:
        scaler.backward(model(x).square().mean(), retries=1)
        with scaler.unscaled(optimizer):
            pass
        scaler.step(optimizer, clip_norm=0.05)

    compiled = compile(scaled if inside == "the loss" else update)
    for _ in range(3):
        found = compiled(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
        if inside == "the loss":
            found.backward()
            scaler.step(optimizer)
        optimizer.zero_grad()
    assert scaler.metrics()["applied"] == 3
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("inside", ["the loss", "the whole step"])
def test_the_scaler_may_be_called_inside_a_compiled_function(inside: str) -> None:
    found = trained_inside(lambda function: torch.compile(function, backend="aot_eager"), inside)
    torch.testing.assert_close(found, trained_inside(lambda function: function, inside))


def test_a_call_of_the_scaler_inside_a_full_graph_is_refused_by_name() -> None:
    scaler = LossScaler(policy=Dynamic())
    compiled = torch.compile(lambda x: scaler.scale(x.sum()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"LossScaler\.scale"):
        compiled(torch.ones(2, requires_grad=True))


@needs_traced_autograd
@pytest.mark.not_simulated("kernels in Python, which the compiler traces")
def test_forward_and_backward_pass_the_rule_and_a_functional_update_are_one_graph() -> None:
    packed = Packed(Dynamic(init_scale=2.0**10, growth_interval=3), norm=True, amax=False, clips=True)
    number, divisor, found_inf = number_of(packed), packed.at("divisor"), packed.at("found_inf")

    def step(weight: Any, state: Any, x: Any) -> Any:
        numbers = state.view(torch.float32)
        loss = (x @ weight).square().mean()
        (grad,) = torch.autograd.grad(loss * numbers[0], (weight,))
        read = torch.stack([torch.linalg.vector_norm(grad), loss.detach()])
        after = advance(state, read, 1, 1, 0.5, number)
        decided = after.view(torch.float32)
        moved = weight.detach() - 0.1 * grad / decided[divisor]
        return torch.where(decided[found_inf] == 0, moved, weight.detach()), after

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    runs = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for run in (step, compiled):
            weight = torch.ones(4, 2).requires_grad_()
            state = torch.from_numpy(packed.pack(packed.policy.start())).to(weight.device)
            for number_of_step in range(12):
                x = torch.full((3, 4), 2.0**60 if number_of_step in (4, 5) else 0.125)  # whose gradients overflow
                weight, state = run(weight, state, x)
                weight = weight.detach().requires_grad_()
            runs.append((weight, state))
    (weight, state), (found, state_found) = runs
    assert torch.equal(state, state_found)
    assert torch.equal(weight, found)
    after = packed.unpack(state.cpu().numpy())[0]
    assert (int(after.applied), int(after.skipped)) == (10, 2)
