"""Clipping does not change what the policy sees: amax is read at some steps and estimated from the norm at others."""

import json
import math

import pytest
import torch
from tests.torch.helpers import INF, give
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, LogMax, Policy
from gradscale.engine.measurement import AMAX_EVERY
from gradscale.engine.saved import opened
from gradscale.torch import LossScaler, StepResult

pytestmark = pytest.mark.usefixtures("either_way")

WIDE = torch.full((64,), 2.0**-10)
"""Its norm is 8 times its largest magnitude."""

ODD = torch.tensor([2.0**-8, *[2.0**-10] * 48])
"""Its norm is 2**-7: twice its largest magnitude."""


def run(scaler: LossScaler, weight: nn.Parameter, gradients: list[Tensor], **asked: float) -> list[StepResult]:
    """Returns the results of steps with these unscaled gradients."""
    optimizer, results = torch.optim.SGD([weight]), []
    for gradient in gradients:
        give(scaler, [weight], [gradient * scaler.loss_scale])
        results.append(scaler.step(optimizer, **asked))  # type: ignore[arg-type]
        optimizer.zero_grad()
    return results


def scales(results: list[StepResult]) -> list[float]:
    return [result.next_scale.item() for result in results]


@pytest.mark.parametrize("policy", [Headroom(), LogMax()], ids=lambda policy: type(policy).__name__)
def test_scales_are_the_same_with_and_without_clipping(policy: Policy) -> None:
    weight = nn.Parameter(torch.zeros(64))
    gradients = [WIDE] * 40
    plain = scales(run(LossScaler(policy=policy), weight, gradients))
    assert scales(run(LossScaler(policy=policy), weight, gradients, clip_norm=1.0)) == plain


def test_amax_is_read_at_the_first_steps_and_then_every_sixteenth() -> None:
    weight = nn.Parameter(torch.zeros(64))
    results = run(LossScaler(policy=Headroom()), weight, [WIDE] * 50, clip_norm=1.0)
    measured = [step for step, result in enumerate(results) if result.amax is not None]
    assert measured == [*range(AMAX_EVERY), 16, 32, 48]
    assert {results[step].amax.item() for step in measured} == {2.0**-10}
    assert all(result.grad_norm.item() == 2.0**-7 for result in results)


def test_between_two_reads_the_estimate_follows_the_norm() -> None:
    weight = nn.Parameter(torch.zeros(64))
    scaler = LossScaler(policy=Headroom())
    run(scaler, weight, [WIDE] * 20, clip_norm=1.0)
    before = scaler.loss_scale.item()
    (result,) = run(scaler, weight, [WIDE * 2**6], clip_norm=1.0)
    assert result.amax is None
    assert result.next_scale.item() == before / 2**6


def test_a_policy_that_follows_nothing_reads_amax_for_the_metrics_only() -> None:
    weight = nn.Parameter(torch.zeros(64))
    scaler = LossScaler(policy=Dynamic(init_scale=1024.0))
    results = run(scaler, weight, [WIDE] * 20, clip_norm=1.0)
    assert [step for step, result in enumerate(results) if result.amax is not None] == [0, 16]
    assert scaler.metrics()["headroom_bits"] == pytest.approx(math.log2(65504) - math.log2(1024.0 * 2.0**-10))
    assert "amax_ratio" not in scaler.state_dict()


def test_an_overflow_keeps_the_ratio() -> None:
    weight = nn.Parameter(torch.zeros(64))
    scaler = LossScaler(policy=Headroom())
    run(scaler, weight, [WIDE] * 16, clip_norm=1.0)
    (bad,) = run(scaler, weight, [torch.full((64,), INF)], clip_norm=1.0)
    assert (bad.amax.item(), bad.grad_norm.item()) == (INF, INF)
    assert opened(scaler.state_dict())["amax_ratio"] == 0.125


def test_a_resumed_run_is_bit_exact() -> None:
    gradients = [ODD if step % 3 else WIDE[:49] for step in range(60)]
    whole = LossScaler(policy=Headroom())
    expected = scales(run(whole, nn.Parameter(torch.zeros(49)), gradients, clip_norm=1.0))
    for cut in (1, 17, 25, 40):
        first = LossScaler(policy=Headroom())
        weight = nn.Parameter(torch.zeros(49))
        head = scales(run(first, weight, gradients[:cut], clip_norm=1.0))
        second = LossScaler()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert head + scales(run(second, weight, gradients[cut:], clip_norm=1.0)) == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("ratio", "error"), [(0.0, ValueError), (1.5, ValueError), (math.nan, ValueError), ("1", TypeError)]
)
def test_a_saved_ratio_that_cannot_be_one_is_refused(ratio: object, error: type[Exception]) -> None:
    scaler = LossScaler(policy=Headroom())
    before = scaler.state_dict()
    with pytest.raises(error, match="`amax_ratio` must be"):
        scaler.load_state_dict(opened(before) | {"amax_ratio": ratio})
    assert scaler.state_dict() == before
