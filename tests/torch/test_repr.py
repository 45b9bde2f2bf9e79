"""PyTorch's scalers and results as text. `step/test_waits.py` has them on a device."""

import pytest
import torch
from tests.torch.helpers import INF, loss_of, poison, small_model

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.cpu_only("on a device the numbers are not read")


def test_scaler_and_result_are_shown_with_scale_status_and_counts() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, Dynamic(init_scale=1024.0))
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=1024.0), scale=1024.0, applied=0, skipped=0)"
    for bad in (None, INF):
        optimizer.zero_grad()
        scaler.backward(loss_of(model))
        if bad is not None:
            poison(next(model.parameters()), bad)
        result = scaler.step(optimizer)
    assert repr(scaler) == "LossScaler(Dynamic(init_scale=1024.0), scale=512.0, applied=1, skipped=1, last=overflow)"
    assert repr(result) == "StepResult(status=overflow, scale=1024.0, next_scale=512.0)"


def test_the_drop_in_is_shown_with_its_settings_scale_and_counts() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    assert repr(scaler) == "GradScaler(growth_interval=1, scale=8.0, applied=0, skipped=0)"
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert repr(scaler) == "GradScaler(growth_interval=1, scale=16.0, applied=1, skipped=0, last=applied)"
    assert repr(scaler.last) == "StepResult(status=applied, scale=8.0, next_scale=16.0)"
    assert (
        repr(GradScaler("cpu", policy="static:8")) == "GradScaler(Static(scale=8.0), scale=8.0, applied=0, skipped=0)"
    )
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"
