"""`LossScaler.step`: unscaling, clipping, and updating all optimizers or none."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.torch.helpers import INF, NAN, OPTIMIZERS, give, loss_of, poison, same, small_model, state_tensors, weights
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


def one_parameter(values: list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_divided_by_the_scale_exactly_once(fused: bool) -> None:
    parameter = one_parameter([1.0, 2.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(1024.0))
    give(scaler, [parameter], [torch.tensor([512.0, -1024.0])])
    scaler.step(optimizer)
    assert parameter.tolist() == [0.5, 3.0]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.5, -1.0]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_step_with_a_bad_gradient_changes_no_weight_and_no_state(fused: bool, bad: float) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = LossScaler(model, Dynamic(init_scale=1024.0))
    for step in range(3):
        scaler.backward(loss_of(model, step))
        scaler.step(optimizer)
        optimizer.zero_grad()
    before, state = weights(model), state_tensors(optimizer)
    scaler.backward(loss_of(model, 3))
    poison(model[2].bias, bad, at=1)
    result = scaler.step(optimizer)
    assert result.skipped()
    assert same(weights(model), before)
    assert same(state_tensors(optimizer), state)
    assert (result.scale.item(), result.next_scale.item()) == (1024.0, 512.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_good_as_new(name: str) -> None:
    def run(skip_first: bool) -> list[Tensor]:
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        scaler = LossScaler(model, Static(1024.0))
        for step in range(skip_first + 2):
            scaler.backward(loss_of(model, step - skip_first))
            if skip_first and step == 0:
                for parameter in model.parameters():
                    poison(parameter)
            scaler.step(optimizer)
            optimizer.zero_grad()
        return weights(model) + state_tensors(optimizer)

    assert same(run(skip_first=True), run(skip_first=False))


@pytest.mark.parametrize("fused", [True, False])
def test_a_first_step_that_is_skipped_leaves_dampened_momentum_as_good_as_new(fused: bool) -> None:
    def run(skip_first: bool) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=fused)
        scaler = LossScaler(model, Static(1024.0))
        for step in range(skip_first + 3):
            scaler.backward(loss_of(model, step - skip_first))
            if skip_first and step == 0:
                poison(model[0].weight)
            scaler.step(optimizer)
            optimizer.zero_grad()
        return weights(model) + state_tensors(optimizer)

    assert same(run(skip_first=True), run(skip_first=False))


@pytest.mark.parametrize("fused", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bad", [0, 1])
def test_several_optimizers_are_updated_all_or_none(fused: tuple[bool, bool], bad: int) -> None:
    models = [small_model(seed) for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=fuse) for model, fuse in zip(models, fused, strict=True)]
    scaler = LossScaler(models, Dynamic(init_scale=1024.0))
    for step, is_bad in enumerate((False, True, False)):
        before = weights(*models)
        scaler.backward(loss_of(models[0], step) + loss_of(models[1], step))
        if is_bad:
            poison(models[bad][0].weight)
        result = scaler.step(*optimizers)
        changed = [not same(weights(model), weights_before) for model, weights_before in _split(models, before)]
        assert result.skipped() is is_bad
        assert changed == [not is_bad] * 2
        for optimizer in optimizers:
            optimizer.zero_grad()


def _split(models: list[nn.Sequential], tensors: list[Tensor]) -> list[tuple[nn.Sequential, list[Tensor]]]:
    half = len(tensors) // 2
    return [(models[0], tensors[:half]), (models[1], tensors[half:])]


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_bounds_the_norm_over_all_optimizers_together(fused: bool) -> None:
    a, b = one_parameter([0.0]), one_parameter([0.0])
    optimizers = [torch.optim.SGD([parameter], lr=1.0, fused=fused) for parameter in (a, b)]
    scaler = LossScaler(policy=Static(16.0))
    give(scaler, [a, b], [torch.tensor([48.0]), torch.tensor([64.0])])
    result = scaler.step(*optimizers, clip_norm=1.0)
    assert result.grad_norm is not None
    assert result.grad_norm.item() == 5.0
    assert [a.item(), b.item()] == pytest.approx([-0.6, -0.8], rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_by_value_is_done_on_unscaled_gradients(fused: bool) -> None:
    parameter = one_parameter([0.0, 0.0, 0.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(1024.0))
    give(scaler, [parameter], [torch.tensor([2048.0, -512.0, -4096.0])])
    scaler.step(optimizer, clip_value=1.0)
    assert parameter.tolist() == [-1.0, 0.5, 1.0]


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_by_value_still_skips_what_is_not_finite_and_leaves_it_visible(fused: bool) -> None:
    parameter = one_parameter([0.0, 0.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(1024.0))
    give(scaler, [parameter], [torch.tensor([INF, NAN])])
    result = scaler.step(optimizer, clip_value=1.0, clip_norm=1.0)
    assert result.skipped()
    assert parameter.tolist() == [0.0, 0.0]
    assert result.culprits()[0].count == 2


def test_the_norm_is_measured_only_if_it_was_asked_for() -> None:
    for policy in ("auto", Dynamic(), Static(4.0)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters())
        scaler = LossScaler(model, policy)
        norms = []
        for norm, clip_norm in ((False, None), (True, None), (False, 1e9)):
            scaler.backward(loss_of(model))
            norms.append(scaler.step(optimizer, norm=norm, clip_norm=clip_norm).grad_norm)
            optimizer.zero_grad()
        assert norms[0] is None
        assert all(norm is not None and 0 < norm.item() < 100 for norm in norms[1:])


def test_a_norm_of_zero_does_not_divide_by_zero() -> None:
    parameter = one_parameter([1.0])
    scaler = LossScaler(policy=Static(4.0))
    give(scaler, [parameter], [torch.zeros(1)])
    assert not scaler.step(torch.optim.SGD([parameter], fused=True), clip_norm=1.0).skipped()
    assert parameter.item() == 1.0


def test_an_infinite_clip_norm_clips_nothing() -> None:
    parameter = one_parameter([0.0])
    scaler = LossScaler(policy=Static(4.0))
    give(scaler, [parameter], [torch.tensor([8.0])])
    scaler.step(torch.optim.SGD([parameter], lr=1.0), clip_norm=math.inf)
    assert parameter.item() == -2.0


@pytest.mark.parametrize("bound", [np.float64(1.0), np.float32(1.0), np.int64(1)])
@pytest.mark.parametrize("policy", [Static(4.0), NoScaling()])
def test_a_bound_may_be_a_number_of_numpys(bound: float, policy: Policy) -> None:
    parameter = one_parameter([0.0])
    scaler = LossScaler(policy=policy)
    give(scaler, [parameter], [torch.tensor([8.0])])
    scaler.step(torch.optim.SGD([parameter], lr=1.0), clip_norm=bound)
    assert parameter.item() == pytest.approx(-1.0, rel=1e-6)


@pytest.fixture(params=[torch.float64, torch.float16], ids=str)
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_type")
@pytest.mark.parametrize("fused", [True, False])
def test_steps_do_not_depend_on_torchs_default_type(fused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float32))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Dynamic(init_scale=4.0))
    for first in (4.0, 8.0, INF):  # the first step measures sizes, the others only look for overflows
        give(scaler, [parameter], [torch.tensor([first, 4.0], dtype=torch.float32)])
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert parameter.tolist() == [-3.0, -2.0]
    assert scaler.loss_scale == 2.0
    assert scaler.loss_scale.dtype is torch.float32


POLICIES: list[Policy] = [
    Dynamic(init_scale=1024.0),
    Static(1024.0),
    Headroom(init_scale=1024.0),
    LogMax(),
    Histogram(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_every_policy_gives_the_same_weights(policy: Policy, clip_norm: float | None) -> None:
    def run(policy: Policy) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = LossScaler(model, policy)
        for step in range(20):
            scaler.backward(loss_of(model, step))
            scaler.step(optimizer, clip_norm=clip_norm)
            optimizer.zero_grad()
        return weights(model)

    for found, expected in zip(run(policy), run(Static(1.0)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert same(run(policy), run(Static(1.0))) or clip_norm is not None


def test_a_step_without_any_gradient_says_so_and_counts_for_nothing() -> None:
    frozen, trained = one_parameter([1.0]), one_parameter([1.0])
    scaler = LossScaler(policy=Dynamic())
    scaler.backward(trained.sum())
    result = scaler.step(torch.optim.AdamW([frozen], fused=True))
    assert result.status() == "no_grads"
    assert result.skipped()
    assert result.culprits() == []
    assert scaler.metrics()["applied"] == scaler.metrics()["skipped"] == 0.0


def test_parameters_without_gradients_are_left_out() -> None:
    used, unused = one_parameter([1.0]), one_parameter([1.0])
    optimizer = torch.optim.AdamW([used, unused], lr=0.1)
    scaler = LossScaler(policy=Static(8.0))
    scaler.backward(used.sum())
    assert not scaler.step(optimizer, clip_norm=1.0).skipped()
    assert used.item() != 1.0
    assert unused.item() == 1.0


def test_a_histogram_sees_the_share_of_scaled_elements_above_its_edge() -> None:
    weight, narrow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    policy = Histogram(init_scale=2.0**10, edge=2.0**-4, threshold=0.3, period=1)
    for above, next_scale in ((1, 2.0**11), (2, 2.0**9)):
        scaler = LossScaler(policy=policy)
        elements = [policy.edge_magnitude] * (4 - above) + [4096.0] * above
        # 4096, the edge as BF16 would round it, is above the edge itself, 4094.
        give(scaler, [weight, narrow], [torch.tensor(elements[:3]), torch.tensor([elements[3]]).bfloat16()])
        assert scaler.step(torch.optim.SGD([weight, narrow])).next_scale.item() == next_scale
