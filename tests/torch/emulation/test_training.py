"""Emulation with the rest of training: scalers, kept weights, gradients of gradients, checkpoints, compiled models."""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.torch.emulation.operations import are_of, distance
from tests.torch.helpers import all_finite, batch, same, small_model, weights
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call
from torch.func import grad as grad_of
from torch.utils.checkpoint import CheckpointError, checkpoint

from gradscale import Dynamic, Static
from gradscale.formats import FP8_E5M2, FP16
from gradscale.torch import GradScaler, LossScaler, emulate

pytestmark = pytest.mark.not_simulated("hundreds of steps")


def loss_of(model: nn.Module, size: float = 1.0, seed: int = 0) -> Tensor:
    x, y = batch(seed)
    return size * F.mse_loss(model(x), y)


def grads_of(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [grad for grad in grads if grad is not None]


def test_gradients_too_small_for_the_format_are_lost_without_a_scale_and_kept_with_one() -> None:
    model, size = small_model(), 1e-7
    loss_of(model, size).backward()
    true = grads_of(model)
    with emulate("e4m3", "e5m2"):
        loss_of(model, size).backward()
        lost = grads_of(model)
        (loss_of(model, size) * 2.0**20).backward()
        kept = grads_of(model)
    assert not any(grad.any() for grad in lost)
    assert max(distance(one * 2.0**-20, other) for one, other in zip(kept, true, strict=True)) < 0.3


def test_a_loss_scaler_skips_an_emulated_overflow_and_goes_on_at_a_lower_scale() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(init_scale=2.0**20))
    skipped, before = 0, weights(model)
    for _ in range(12):
        with emulate("e4m3", "e5m2"):
            loss = loss_of(model)
        scaler.backward(loss)
        if scaler.step(optimizer).skipped():
            skipped += 1
            assert same(weights(model), before)
        optimizer.zero_grad()
    assert 0 < skipped < 12
    assert not same(weights(model), before)
    assert all_finite(weights(model))


def test_the_drop_in_trains_an_emulated_model() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    losses: list[float] = []
    for _ in range(60):
        with emulate("fp16"):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_weight_that_a_step_has_changed_is_rounded_anew_in_the_same_block(fused: bool) -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, fused=fused)
    with emulate("fp16"):
        model(x).sum().backward()
        optimizer.step()
        found = model(x)
    with emulate("fp16"):
        assert torch.equal(found, model(x))


def test_a_block_may_hold_several_backward_passes() -> None:
    model = small_model()
    for seed in range(3):
        with emulate("fp16"):
            loss_of(model, seed=seed).backward()
    apart = grads_of(model)
    with emulate("fp16"):
        for seed in range(3):
            loss_of(model, seed=seed).backward()
    assert same(grads_of(model), apart)


def test_a_weight_used_without_gradients_first_still_gets_one() -> None:
    model = small_model()
    with emulate("fp16"):
        with torch.no_grad():
            loss_of(model)
        loss_of(model).backward()
    assert all(grad.any() for grad in grads_of(model))


def test_nothing_of_a_block_is_kept_alive_after_it() -> None:
    model, x = small_model(), torch.randn(3, 4)
    gc.collect()
    gc.disable()
    try:
        with emulate("fp16"):
            y = model(x)
        kept = weakref.ref(y)
        del y
        assert kept() is None
    finally:
        gc.enable()


def penalty(model: nn.Module, context: Callable[[], object]) -> list[Tensor]:
    """Returns the gradients of the squared norm of the gradient by the inputs."""
    x = batch()[0].requires_grad_()
    with context():  # type: ignore[attr-defined]
        y = model(x)
    (by_inputs,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    by_inputs.square().sum().backward()
    return grads_of(model)


def test_gradients_of_gradients_are_within_rounding_of_autocast() -> None:
    model = small_model()
    found = penalty(model, lambda: emulate("fp16"))
    expected = penalty(model, lambda: torch.autocast("cpu", dtype=torch.float16))
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 4 * 2.0**-10


def test_gradients_of_gradients_are_rounded_too() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with emulate("e5m2"):
        y = F.linear(x, w)
    (by_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (by_w,) = torch.autograd.grad(by_x.square().sum(), w)
    assert are_of(by_x, FP8_E5M2)
    assert are_of(by_w, FP8_E5M2)
    assert by_w.any()


def test_transforms_of_torch_func_make_the_same_gradients() -> None:
    model = small_model()
    with emulate("fp16"):
        loss_of(model).backward()
    x, y = batch()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        with emulate("fp16"):
            return F.mse_loss(functional_call(model, parameters, (x,)), y)

    found = grad_of(loss)({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert same(found.values(), grads_of(model))


def checkpointed(block: nn.Module, again: Callable[..., Tensor], reentrant: bool) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with emulate("e4m3"):
        y = checkpoint(again, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *grads_of(block)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_decorated_checkpoint_makes_the_gradients_that_are_made_without(reentrant: bool) -> None:
    block = small_model()
    found = checkpointed(block, emulate("e4m3")(block), reentrant)
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with emulate("e4m3"):
        y = block(x)
    y.square().sum().backward()
    assert x.grad is not None
    assert same(found, [x.grad, *grads_of(block)])


def test_a_checkpoint_that_would_be_computed_again_in_float32_is_refused() -> None:
    block = small_model()
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        checkpointed(block, block, reentrant=False)


def test_stochastic_rounding_with_a_seed_makes_the_same_gradients_again_and_others_with_another() -> None:
    model = small_model()

    def run(seed: int) -> list[Tensor]:
        with emulate("e4m3", "e5m2", rounding="stochastic", seed=seed):
            loss_of(model).backward()
        return grads_of(model)

    first = run(1)
    assert same(run(1), first)
    assert not same(run(2), first)


def test_stochastic_rounding_lets_small_gradients_through_on_average() -> None:
    x = torch.ones(1, 1, requires_grad=True)
    emulation = emulate("e5m2", rounding="stochastic", seed=0)
    with emulation:
        y = F.linear(x.expand(20_000, 1), torch.ones(1, 1))
    (grads,) = torch.autograd.grad(y, x, torch.full_like(y, FP8_E5M2.smallest_subnormal / 8))
    count = grads.item() / FP8_E5M2.smallest_subnormal
    assert abs(count - 2500) < 5 * (20_000 * (1 / 8) * (7 / 8)) ** 0.5 + count * 2.0**-FP8_E5M2.mantissa_bits


@pytest.fixture
def _compiled_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiled_afresh")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of the compiler itself
def test_a_compiled_model_is_emulated_inside_the_block_and_compiled_outside() -> None:
    model, x = small_model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="aot_eager")
    expected = model(x)
    with emulate("fp16"):
        emulated = model(x)
    torch.testing.assert_close(compiled(x), expected)
    with emulate("fp16"):
        assert torch.equal(compiled(x), emulated)
    assert are_of(emulated, FP16)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.usefixtures("_compiled_afresh")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_model_compiled_to_one_graph_is_refused_inside_the_block() -> None:
    compiled = torch.compile(small_model(), backend="aot_eager", fullgraph=True)
    # An older version that takes no reason names the function that it does not compile.
    takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters
    reason = r"`gradscale\.torch\.emulate` runs uncompiled" if takes_reason else "EmulationMode"
    with emulate("fp16"), pytest.raises(Unsupported, match=reason):
        compiled(torch.randn(3, 4))


def test_static_scaling_by_a_power_of_two_leaves_large_gradients_as_they_are() -> None:
    model = small_model()
    with emulate("fp16"):
        loss_of(model).backward()
    expected = grads_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LossScaler(model, Static(2.0**4))
    with emulate("fp16"):
        loss = loss_of(model)
    scaler.backward(loss)
    scaler.step(optimizer)
    assert same(grads_of(model), expected)
