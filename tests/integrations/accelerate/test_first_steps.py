"""Short runs whose first gradients overflow at torch's first scale: which steps are lost."""

import pytest
import torch
from accelerate import Accelerator
from tests.integrations.accelerate.run import Place, ours, torchs
from tests.torch.short_runs import fine_tuned_model, lost_steps
from torch import Tensor

runs = pytest.mark.parametrize("steps", [3, 10, 50])


def lost(place: Place, steps: int, *, fused: bool, clip: bool) -> list[int]:
    """Returns the steps that have not changed the weights."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    place(accelerator)
    model = fine_tuned_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused))

    def train_step(loss: Tensor) -> None:
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return lost_steps(model, optimizer, train_step, steps)


@runs
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_no_step_is_lost(steps: int, fused: bool, clip: bool) -> None:
    assert lost(ours("auto"), steps, fused=fused, clip=clip) == []


@runs
@pytest.mark.parametrize("place", [torchs(2.0**16), ours("torch")], ids=["torch's scaler", "torch's rule"])
def test_early_steps_are_lost_under_torchs_rule(place: Place, steps: int) -> None:
    assert lost(place, steps, fused=True, clip=True)[:3] == [0, 1, 2]


def test_retries_can_be_asked_for() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    ours("torch")(accelerator)
    model = fine_tuned_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))

    def train_step(loss: Tensor) -> None:
        accelerator.backward(loss, retries=20)
        optimizer.step()

    assert lost_steps(model, optimizer, train_step, 3) == []


def test_retries_of_install_are_those_of_every_backward_pass() -> None:
    assert lost(ours("torch", retries=20), 3, fused=True, clip=True) == []


def test_retries_must_be_a_count() -> None:
    with pytest.raises(ValueError, match=r"`retries` must not be negative\. Received: retries=-1"):
        ours(retries=-1)(Accelerator(cpu=True, mixed_precision="fp16"))
