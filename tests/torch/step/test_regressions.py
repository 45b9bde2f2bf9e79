"""Mistakes that other loss scalers have made, each held against both of ours. Numbers are issues of those projects."""

from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, all_finite, loss_of, poison, same, small_model, state_tensors, weights
from tests.torch.loops import LOOPS, Loop
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

both = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])


def one_weight(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def make_grad(model: nn.Linear, loop: Loop, true_gradient: float) -> None:
    loop.backward((model.weight * true_gradient).sum())


@both
@fused_or_not
def test_a_skipped_step_is_reported_for_every_optimizer(loop: type[Loop], fused: bool) -> None:
    """accelerate#4242: a fused optimizer's `step` is always called, so watching the call reports no skip."""
    model = small_model()
    optimizer, running = torch.optim.AdamW(model.parameters(), fused=fused), loop(model)
    reported = []
    for bad in (False, True, False):
        running.backward(loss_of(model))
        if bad:
            poison(model[0].weight)
        reported.append(running.step(optimizer))
        optimizer.zero_grad()
    assert reported == [True, False, True]


@both
def test_a_skipped_step_is_reported_under_accumulation(loop: type[Loop]) -> None:
    """accelerate#2828: an overflow in one micro-batch was lost when the flag was reset by the next."""
    for bad_one in range(3):
        model = small_model()
        optimizer, running = torch.optim.AdamW(model.parameters(), fused=True), loop(model)
        for micro_batch in range(3):
            running.backward(loss_of(model, micro_batch))
            if micro_batch == bad_one:
                poison(model[0].weight)
        assert running.step(optimizer) is False


@both
@fused_or_not
def test_a_schedule_is_stepped_once_per_applied_step(loop: type[Loop], fused: bool) -> None:
    """coqui-ai-Trainer#23: comparing scales to find skips, the schedule was never stepped at all, or twice."""
    model = small_model()
    optimizer, running = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused), loop(model, growth_interval=1)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(5):
        running.backward(loss_of(model, step))
        if step in (0, 3):
            poison(model[0].weight)
        if running.step(optimizer):
            schedule.step()
        optimizer.zero_grad()
    assert schedule.get_last_lr() == [1 / 4]


@both
@fused_or_not
def test_gradients_are_divided_by_the_scale_that_made_them_when_the_scale_grows(loop: type[Loop], fused: bool) -> None:
    """DeepSpeed#8588: the scale was updated before unscaling, so gradients were halved on every growth step."""
    model = one_weight()
    optimizer, running = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), loop(model, growth_interval=1)
    for step in range(4):
        make_grad(model, running, 3.0)
        running.step(optimizer)
        optimizer.zero_grad()
        assert model.weight.item() == -3.0 * (step + 1)


@both
@fused_or_not
@pytest.mark.parametrize("clip", [None, 1e9])
def test_unscaling_first_and_a_fused_optimizer_divide_once(loop: type[Loop], fused: bool, clip: float | None) -> None:
    """pytorch#94060: fused Adam divided gradients again that `unscale_` had divided."""
    model = one_weight()
    optimizer, running = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), loop(model)
    make_grad(model, running, 3.0)
    running.step(optimizer, unscale=True, clip=clip)
    assert model.weight.item() == pytest.approx(-3.0, rel=1e-6)


@both
@fused_or_not
def test_an_overflow_is_honoured_after_unscaling_first(loop: type[Loop], fused: bool) -> None:
    """pytorch#95847: without `grad_scale`, fused kernels dropped `found_inf` and stepped with inf."""
    model = small_model()
    optimizer, running = torch.optim.AdamW(model.parameters(), fused=fused), loop(model)
    before = weights(model)
    running.backward(loss_of(model))
    poison(model[0].weight)
    running.step(optimizer, unscale=True)
    assert same(weights(model), before)


@both
@fused_or_not
@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_that_is_infinite_only_once_unscaled_is_not_applied(
    loop: type[Loop], fused: bool, unscale: bool
) -> None:
    """pytorch#96755, #99640: the check looked at the gradient before it was divided by a scale below 1."""
    model = one_weight()
    optimizer, running = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), loop(model, init_scale=2.0**-20)
    make_grad(model, running, 1.0)
    model.weight.grad = torch.full((1, 1), 3e38)
    running.step(optimizer, unscale=unscale)
    assert model.weight.item() == 0.0


@both
def test_a_state_can_be_loaded_before_the_first_loss(loop: type[Loop]) -> None:
    """fairseq2#1346: loading before the first `scale` failed because the scale was made lazily."""
    model = small_model()
    saved = loop(model, init_scale=256.0).save()
    running = loop(model)
    running.load(saved)
    running.backward(loss_of(model))
    running.step(torch.optim.SGD(model.parameters()))
    assert running.scale == 256.0


@both
def test_resuming_keeps_the_scale_that_was_reached(loop: type[Loop]) -> None:
    """transformers#34053: the scale was 256 before the checkpoint and 65536 after it."""
    model = small_model()
    optimizer, running = torch.optim.SGD(model.parameters()), loop(model)
    for _ in range(8):
        running.backward(loss_of(model))
        poison(model[0].weight)
        running.step(optimizer)
        optimizer.zero_grad()
    resumed = loop(model)
    resumed.load(running.save())
    assert resumed.scale == running.scale == 256.0


@both
def test_the_scale_never_grows_to_infinity(loop: type[Loop]) -> None:
    """pytorch#98828: growing for ever, the scale overflowed float32 and every step after it was lost."""
    model = one_weight()
    optimizer, running = (
        torch.optim.SGD(model.parameters(), lr=0.0),
        loop(model, init_scale=2.0**124, growth_interval=1),
    )
    for _ in range(6):
        make_grad(model, running, 2.0**-60)
        running.step(optimizer)
        optimizer.zero_grad()
    assert 2.0**124 < running.scale < INF


@pytest.mark.filterwarnings("ignore:[0-9]+ steps in a row were skipped:UserWarning")
@both
@fused_or_not
def test_the_scale_never_reaches_zero_and_no_weight_becomes_nan(loop: type[Loop], fused: bool) -> None:
    """torch.amp.GradScaler: at scale 0 gradients are 0, 0 times inf is NaN, and the check has seen a 0."""
    model = one_weight(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    running = loop(model, init_scale=2.0**-28)
    for _ in range(200):
        make_grad(model, running, 1.0)
        poison(model.weight)
        running.step(optimizer)
        optimizer.zero_grad()
        if running.scale == 0.0:
            break
    make_grad(model, running, 1.0)
    running.step(optimizer)
    assert running.scale > 0
    assert all_finite(model.parameters())


def test_an_optimizer_without_gradients_says_so_instead_of_failing() -> None:
    """Lightning#4524: "No inf checks were recorded for this optimizer" for one whose turn it was not."""
    trained, idle = one_weight(), one_weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (trained, idle)]
    scaler = LossScaler([trained, idle], Dynamic())
    for _ in range(2):
        scaler.backward(trained.weight.sum())
        assert scaler.step(*optimizers).status() == "applied"
        optimizers[0].zero_grad()
    scaler.backward(trained.weight.sum())
    assert scaler.step(optimizers[1]).status() == "no_grads"


def test_batch_norms_statistics_survive_a_skipped_step() -> None:
    """pytorch#88474: the step is skipped and the running statistics are NaN for the rest of the run."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, Dynamic())
    scaler.protect_buffers()
    for x in (torch.randn(8, 4), torch.full((8, 4), INF), torch.randn(8, 4)):
        scaler.backward(model(x).mean())
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert all_finite(model.buffers())
    assert torch.isfinite(model.eval()(torch.randn(8, 4))).all()


class NoDoubles(TorchDispatchMode):
    """A device without float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float64:
            raise TypeError(f"no float64 on this device: {func}")
        return out


@both
@fused_or_not
def test_no_double_precision_is_needed(loop: type[Loop], fused: bool) -> None:
    """pytorch#147731: the reciprocal of the scale was computed in float64, which some devices do not have."""
    model = small_model()
    optimizer, running = torch.optim.AdamW(model.parameters(), fused=fused), loop(model, growth_interval=1)
    for bad in (False, True):
        loss = loss_of(model)
        with NoDoubles():
            running.backward(loss)
            if bad:
                poison(model[0].weight)
            running.step(optimizer, clip=1.0)
        optimizer.zero_grad()


@both
@fused_or_not
def test_a_run_that_skipped_every_step_can_be_saved_and_resumed(loop: type[Loop], fused: bool) -> None:
    """Megatron-LM#602: after a run in which every iteration was skipped, saving crashed on the empty state."""
    model = small_model()
    optimizer, running = torch.optim.AdamW(model.parameters(), fused=fused), loop(model)
    for _ in range(3):
        running.backward(loss_of(model))
        poison(model[0].weight)
        running.step(optimizer)
        optimizer.zero_grad()
    other = torch.optim.AdamW(model.parameters(), fused=fused)
    other.load_state_dict(optimizer.state_dict())
    resumed = loop(model)
    resumed.load(running.save())
    resumed.backward(loss_of(model))
    resumed.step(other)
    assert all(state["step"].item() == 1 for state in other.state.values())
    assert all_finite(state_tensors(other))


@both
@fused_or_not
def test_clipping_with_accumulation_is_clipping_of_the_unscaled_sum(loop: type[Loop], fused: bool) -> None:
    """transformers#23935: unscaling at every micro-batch raised, and clipping saw gradients of two scales."""
    model = one_weight()
    optimizer, running = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), loop(model, growth_interval=1)
    for step in range(3):
        for _ in range(4):
            make_grad(model, running, 1.0)
        running.step(optimizer, clip=2.0)
        optimizer.zero_grad()
        assert model.weight.item() == pytest.approx(-2.0 * (step + 1), rel=1e-6)


@both
def test_fused_momentum_is_not_uninitialised_after_a_skipped_first_step(loop: type[Loop]) -> None:
    """torch.amp.GradScaler with fused SGD: the kernel that should fill the new buffer skips."""
    for size in range(1, 60):
        model = nn.Linear(size, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        running = loop(model)
        noise = [torch.full((size, 7), 1e30) for _ in range(4)]
        del noise
        for bad in (True, False):
            running.backward(model(torch.ones(1, size)).sum())
            if bad:
                poison(model.weight)
            running.step(optimizer)
            optimizer.zero_grad()
        assert all((state["momentum_buffer"] == 1).all() for state in optimizer.state.values())


@both
def test_a_half_precision_loss_does_not_overflow_when_it_is_scaled(loop: type[Loop]) -> None:
    """torch.amp.GradScaler: an FP16 loss with a dimension times 65536 is inf."""
    running: Any = loop(one_weight())
    assert torch.isfinite(running.scaler.scale(torch.full((2,), 3.0, dtype=torch.float16))).all()


@both
def test_complex_gradients_are_unscaled_and_checked(loop: type[Loop]) -> None:
    """torch.amp.GradScaler: its kernel knows no complex numbers."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    optimizer, running = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False), loop(model)
    before = weights(model)
    running.backward((model.weight * (3 + 4j)).sum().real)
    assert running.step(optimizer)
    assert torch.allclose(model.weight, before[0] - (3 - 4j))
    optimizer.zero_grad()
    running.backward((model.weight * (3 + 4j)).sum().real)
    poison(model.weight, INF)
    assert running.step(optimizer) is False
