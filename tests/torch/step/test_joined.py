"""Small gradients in host memory are measured together: the largest of all is that of each measured alone."""

import math
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN
from torch import Tensor, nn

from gradscale import Headroom
from gradscale.kernels.torch import JOIN_AT_ONCE, JOIN_UP_TO, largest, largest_joined
from gradscale.torch import GradScaler, LossScaler
from gradscale.torch.step.measure import measure_sizes

pytestmark = pytest.mark.cpu_only("elsewhere a read of the host would synchronize")

CPU = torch.device("cpu")


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 0, 7), (4, JOIN_UP_TO + 1, 6, JOIN_UP_TO), (2, 2, 2 * JOIN_UP_TO)])
@pytest.mark.parametrize("value", [None, -9.0, 9.0, 0.0])
def test_the_largest_of_all_is_that_of_each_alone(sizes: Any, dtype: torch.dtype, value: float | None) -> None:
    given = tensors(*sizes, dtype=dtype)
    for index in range(len(given)):
        if value is not None and given[index].numel():
            given[index][-1] = value
        found = largest_joined(given)
        assert found == largest(given, CPU).amax().item()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_is_found_and_measured_alone(bad: float, where: int) -> None:
    given = tensors(5, 2 * JOIN_UP_TO, 3)
    given[where][1] = bad
    assert largest_joined(given) is None
    found = measure_sizes(given, CPU, each=False)
    assert found.sizes is not None
    assert [math.isfinite(size) for size in found.sizes.tolist()] == [index != where for index in range(3)]


def test_sizes_of_finite_gradients_are_given_if_asked_for() -> None:
    given = tensors(5, 3)
    assert measure_sizes(given, CPU, each=False).sizes is None
    assert measure_sizes(given, CPU).sizes is not None


@pytest.mark.parametrize(
    "given",
    [
        [],
        tensors(0, 0),
        tensors(5),
        tensors(5, 2 * JOIN_UP_TO),
        tensors(5, 5, dtype=torch.float64),
        tensors(5) + tensors(5, dtype=torch.float16),
        tensors(*[JOIN_UP_TO] * (JOIN_AT_ONCE // JOIN_UP_TO + 1)),
    ],
    ids=["none", "empty", "one", "one small", "float64", "two types", "too many"],
)
def test_others_are_not_joined(given: list[Tensor]) -> None:
    assert largest_joined(given) is None


@pytest.mark.parametrize("fused", [False, True])
def test_both_scalers_name_the_one_that_is_not_finite(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scalers: list[Any] = [LossScaler(model, Headroom()), GradScaler("cpu", policy=Headroom())]
    for scaler in scalers:
        for poisoned in (False, True):
            optimizer.zero_grad()
            scaler.backward(model(torch.ones(4, 2)).mean())
            if poisoned:
                model[1].weight.grad[0, 1] = -INF  # type: ignore[index]
            result: Any = scaler.step(optimizer)
            if isinstance(scaler, GradScaler):
                scaler.update()
                result = scaler.last
            assert [culprit.count for culprit in result.culprits()] == [1] * poisoned


@pytest.mark.parametrize("policy", [None, Headroom()])
def test_a_fused_step_of_the_drop_in_counts_its_gradients(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), GradScaler("cpu", policy=policy)
    scaler.backward(model(torch.ones(4, 2)).mean())
    scaler.step(optimizer)
    assert scaler.last is not None
    assert scaler.last.parameters == 4
