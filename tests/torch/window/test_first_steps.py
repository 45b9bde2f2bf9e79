"""The first steps of a short run, whose gradients overflow at torch's first scale: none is lost, or run again."""

import pytest
import torch
from tests.torch.short_runs import fine_tuned_model, large_loss, lost_steps
from torch import Tensor

from gradscale import Dynamic, Headroom, Histogram, LogMax, Policy, preset
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


@pytest.mark.parametrize("policy", ["auto", LogMax()], ids=str)
@pytest.mark.parametrize("steps", [3, 10, 50])
def test_a_short_run_loses_no_step(steps: int, policy: Policy | str) -> None:
    model = fine_tuned_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = LossScaler(model, policy)

    def train_step(loss: Tensor) -> None:
        scaler.backward(loss)
        assert scaler.step(optimizer).retries == 0

    assert lost_steps(model, optimizer, train_step, steps) == []


@pytest.mark.not_simulated("torch's scaler has no kernels there")
@pytest.mark.parametrize(("steps", "at_least"), [(3, 3), (10, 9), (50, 9)])
def test_torchs_scaler_loses_the_first_steps_of_the_same_run(steps: int, at_least: int) -> None:
    model = fine_tuned_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(torch.get_default_device().type)

    def train_step(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    lost = lost_steps(model, optimizer, train_step, steps)
    assert lost[:at_least] == list(range(at_least))


POLICIES = [Headroom(init_scale=2.0**16), LogMax(init_scale=2.0**16), Dynamic(), Histogram(), preset("openseq2seq")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_backward_pass_that_overflows_is_not_run_again_unasked(policy: Policy) -> None:
    model = fine_tuned_model()
    scaler = LossScaler(model, policy)
    scaler.backward(large_loss(model))
    result = scaler.step(torch.optim.SGD(model.parameters(), lr=1e-4))
    assert (result.retries, result.skipped()) == (0, True)
