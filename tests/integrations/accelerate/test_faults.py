"""Faults of Accelerate with torch's scaler that nothing reports, each beside the same run with `install`."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from tests.integrations.accelerate.run import Place, Run, ours, torchs
from torch import Tensor, nn

from gradscale.torch import LossScaler


def test_fp16_on_a_cpu_is_silently_float32_without_a_scaler() -> None:
    fault = Run(lambda accelerator: None, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]).train(1)
    assert fault.types == {torch.float32}
    assert fault.accelerator.scaler is None


def test_fp16_on_a_cpu_is_fp16_with_the_given_scaler() -> None:
    run = Run(ours(None), kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]).train(1)
    assert run.types == {torch.float16}
    assert run.scaler.get_scale() == 64.0


def test_autocast_of_the_accelerator_is_fp16_on_a_cpu_too() -> None:
    product = {}
    for place in (lambda accelerator: None, ours()):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        scaler = place(accelerator)
        with accelerator.autocast():
            product[scaler is not None] = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    assert product == {False: torch.float32, True: torch.float16}


def test_scaler_without_native_amp_silently_clips_scaled_gradients() -> None:
    def place(accelerator: Accelerator) -> None:
        torchs()(accelerator)
        accelerator.native_amp = False

    # The model computes in float32 here, and the norm is too large by the scale.
    fault, run = Run(place).train(1), Run(ours()).train(1)
    assert fault.norms[0] / 1024 == pytest.approx(run.norms[0], rel=1e-2)


@pytest.mark.parametrize(
    ("place", "skips", "steps"),
    [(torchs(), [False] * 4, 4), (ours(), [False, True, False, False], 3)],
    ids=["torch's, silently not noticed", "gradscale's"],
)
def test_skipped_step_of_a_fused_optimizer(place: Place, skips: list[bool], steps: int) -> None:
    run = Run(place, fused=True).train(1, bad_steps=[1])
    assert run.skips == skips
    assert run.schedule_steps == steps


TWO = [pytest.param(torchs(8.0, growth_interval=1), False, id="torch's, silently wrong")]
TWO += [pytest.param(ours("torch:init_scale=8.0,growth_interval=1"), True, id="gradscale's")]


def two_optimizers(place: Place, *, bad: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights of two modules of ones after a step each of size 1, on one backward pass."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    place(accelerator)
    parts = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for part in parts:
        nn.init.ones_(part.weight)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts]
    first, second, *optimizers = accelerator.prepare(*parts, *optimizers)
    accelerator.backward(first.weight.sum() + second.weight.sum())
    if bad:
        first.weight.grad[0, 0] = torch.inf
    for optimizer in optimizers:
        optimizer.step()
    return first.weight.detach(), second.weight.detach()


@pytest.mark.parametrize(("place", "exact"), TWO)
def test_second_of_two_optimizers_on_one_backward_pass_after_a_skip(place: Place, exact: bool) -> None:
    first, second = two_optimizers(place, bad=True)
    assert torch.equal(first, torch.ones(2, 2))
    assert torch.equal(second, torch.full((2, 2), 0.0 if exact else -1.0))


@pytest.mark.parametrize(("place", "exact"), TWO)
def test_second_of_two_optimizers_on_one_backward_pass_after_growth(place: Place, exact: bool) -> None:
    first, second = two_optimizers(place, bad=False)
    assert torch.equal(first, torch.zeros(2, 2))
    assert torch.equal(second, torch.full((2, 2), 0.0 if exact else 0.5))


def test_two_optimizers_are_exact_when_both_are_unscaled_for_clipping() -> None:
    """Accelerate unscales all optimizers before it clips, and calls `update` after each `step`."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scaler = ours("torch:init_scale=8.0")(accelerator)
    parts = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for part in parts:
        nn.init.ones_(part.weight)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts]
    first, second, *optimizers = accelerator.prepare(*parts, *optimizers)
    for clips in (False, True):
        with torch.no_grad():
            second.weight.fill_(1.0)
        accelerator.backward(first.weight.sum() + second.weight.sum())
        first.weight.grad[0, 0] = torch.inf
        if clips:
            accelerator.clip_grad_norm_(second.parameters(), 100.0)
        for optimizer in optimizers:
            optimizer.step()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
        assert first.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert second.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("guarded", [False, True], ids=["silently not noticed", "behind the guard"])
def test_skipped_step_of_a_loss_scaler_beside_accelerate(guarded: bool, tmp_path: Path) -> None:
    """Accelerate does not know of a scaler that is not its own, and its schedule advances at a skipped step."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    )
    scaler = LossScaler(model, "torch:init_scale=1024.0")
    accelerator.register_for_checkpointing(scaler)
    schedule = scaler.guard(scheduler, on_skip="hold") if guarded else scheduler
    for bad in (False, True):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(4, 2)).square().mean()
        scaler.backward(loss)
        if bad:
            model.weight.grad[0, 0] = torch.inf
        assert scaler.step(optimizer, clip_norm=1.0).skipped() is bad
        assert not accelerator.optimizer_step_was_skipped
        schedule.step()
        optimizer.zero_grad()
    assert scheduler.scheduler.last_epoch == (1 if guarded else 2)
    saved = scaler.state_dict()
    accelerator.save_state(str(tmp_path))
    scaler.load_state_dict(LossScaler(model).state_dict())
    accelerator.load_state(str(tmp_path))
    assert scaler.state_dict() == saved


def test_loss_scaler_beside_accelerate_refuses_steps_within_an_accumulated_batch() -> None:
    """Where a prepared optimizer ignores `step` and `zero_grad`, gradients would be divided at every micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    scaler = LossScaler(model, "torch:init_scale=1024.0")

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            scaler.backward(model(torch.ones(4, 2)).square().mean() / 2)
            scaler.step(optimizer)
            optimizer.zero_grad()

    micro_batch()
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        micro_batch()
