"""A scaler whose backward pass runs in BF16 says once that it is not needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import small_model
from torch import Tensor, nn

from gradscale import NoScaling
from gradscale.engine import bf16
from gradscale.torch import GradScaler, LossScaler

NOTE = r"scales a loss whose backward pass runs in BF16"


@pytest.fixture(autouse=True)
def _not_noted_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "_noted", [])


def loss_of(model: nn.Module, device: torch.device) -> Tensor:
    """Returns a float32 loss, as most are."""
    return model(torch.ones(2, 4, device=device)).float().square().mean()


def block(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


SCALED: dict[str, Callable[[torch.device], Callable[[Tensor], Any]]] = {
    "LossScaler.scale": lambda device: LossScaler(policy="dynamic").scale,
    "LossScaler.backward": lambda device: LossScaler(policy="dynamic").backward,
    "GradScaler.scale": lambda device: GradScaler(device.type).scale,
}


@pytest.mark.not_simulated("autocast has no rules there")
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("dtype", "notes"), [(torch.bfloat16, 1), (torch.float16, 0), (None, 0)], ids=str)
def test_a_scaler_under_bf16_autocast_says_once_that_it_is_not_needed(
    name: str, dtype: torch.dtype | None, notes: int, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    for scaled in (SCALED[name](device), SCALED[name](device)):
        for _ in range(2):
            with block(dtype, device):
                scaled(loss_of(model, device))
            model.zero_grad()
    assert len(caplog.messages) == notes
    assert all(f"A {name.partition('.')[0]} {NOTE}" in message for message in caplog.messages)


@pytest.mark.not_simulated("autocast has no rules there")
def test_retries_and_a_loss_in_bf16_are_noticed_too(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    with block(torch.bfloat16, device):
        LossScaler(model).backward(loss_of(model, device), retries=1)
    assert len(caplog.messages) == 1
    monkeypatch.setattr(bf16, "_noted", [])
    LossScaler(model).scale(torch.ones((), dtype=torch.bfloat16, requires_grad=True))
    assert len(caplog.messages) == 2


@pytest.mark.not_simulated("autocast has no rules there")
def test_nothing_is_said_where_something_is_fp16_or_nothing_is_scaled(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    with block(torch.bfloat16, device):
        LossScaler(model).scale(loss_of(model, device).half())
        LossScaler(model, NoScaling()).backward(loss_of(model, device))
        GradScaler(device.type, enabled=False).scale(loss_of(model, device))
    assert caplog.messages == []
