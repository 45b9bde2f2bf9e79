"""The count of gradient memory read and written: what it sees, what torch's scaler does, and the budget of ours."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from benchmarks.sides import Case, StepSide, bare, grad_scaler, loss_scaler
from benchmarks.traffic import Bytes, Traffic, count
from torch import Tensor

from gradscale.torch import GradScaler

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Passes = tuple[float, float]
aten = torch.ops.aten

LARGE, SMALL = [(32_768,), (256, 128)], [(64, 64)] * 4
"""Tensors that are measured one by one on the CPU, and those that are measured together."""

FUSED: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "adagrad": partial(torch.optim.Adagrad, fused=True),
}
OTHERS: dict[str, MakeOptimizer] = {
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw loop": partial(torch.optim.AdamW, foreach=False),
    "sgd foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "adagrad foreach": partial(torch.optim.Adagrad, foreach=True),
}

CHECK = "_amp_foreach_non_finite_check_and_unscale_"
READ, WRITTEN, CHANGED = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)


def step_case(make: MakeOptimizer, clip: float | None, shapes: list[tuple[int, ...]] = LARGE) -> Case:
    return Case("a step", shapes, make, clip)


def passes(traffic: Traffic) -> Passes:
    return traffic.passes_read, traffic.passes_written


def by_operator(traffic: Traffic) -> dict[str, Passes]:
    whole = traffic.gradient_bytes
    return {name: (moved.read / whole, moved.written / whole) for name, moved in traffic.by_operator.items()}


def beyond_the_update(side: Callable[[Case], StepSide], case: Case) -> Passes:
    """Returns the passes that are not the optimizer's own: some of torch's read a gradient twice."""
    update = count(bare(step_case(case.make_optimizer, None, list(case.shapes))))
    whole = count(side(case))
    return whole.passes_read - update.passes_read, whole.passes_written - update.passes_written


def ones() -> Tensor:
    return torch.ones(6)


OPERATORS: dict[str, tuple[Callable[[Tensor], object], Passes]] = {
    "an operator that returns something new": (lambda g: g * 2, READ),
    "the same gradient twice": (lambda g: torch.dot(g, g), READ),
    "an operator in place": (lambda g: g.mul_(2), CHANGED),
    "a list of gradients": (lambda g: aten._foreach_norm([g, ones()]), READ),
    "a list in place": (lambda g: aten._foreach_mul_([ones(), g], 2.0), CHANGED),
    "a copy from it": (lambda g: ones().copy_(g), READ),
    "a copy into it": (lambda g: g.copy_(ones()), WRITTEN),
    "zeroing": (lambda g: g.zero_(), WRITTEN),
    "an output argument": (lambda g: torch.mul(ones(), 2, out=g), WRITTEN),
    "an output argument that is also an input": (lambda g: torch.mul(g, 2, out=g), CHANGED),
    "torch's check": (lambda g: aten._amp_foreach_non_finite_check_and_unscale_([g], ones()[:1], ones()[0]), CHANGED),
    "half of it": (lambda g: g[:3].add_(1), (0.5, 0.5)),
    "a view": (lambda g: g.view(2, 3).t().detach().expand(4, 3, 2), (0.0, 0.0)),
    "a view made of a new tensor": (lambda g: g.view(2, 3).t().reshape(-1), READ),
    "an operator on a view": (lambda g: g.view(2, 3).t().sum(), READ),
    "its shape alone": (lambda g: [torch.zeros_like(g), g.new_empty(3), g.numel()], (0.0, 0.0)),
    "a list with an empty tensor": (lambda g: aten._foreach_mul([g, torch.ones(0)], 2.0), READ),
    "other memory": (lambda g: ones().mul_(2).sum(), (0.0, 0.0)),
    "reading an element": (lambda g: g[0].item(), (1 / 6, 0.0)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_counter_knows(name: str) -> None:
    run, expected = OPERATORS[name]
    with Traffic([ones()]) as nothing:
        run(ones())
    assert passes(nothing) == (0.0, 0.0)
    gradient = ones()
    with Traffic([gradient]) as traffic:
        run(gradient)
    assert passes(traffic) == expected


def test_memory_that_was_freed_inside_is_not_taken_for_a_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    with Traffic([parameter.grad]) as traffic:
        parameter.grad = None
        for _ in range(10):
            torch.ones(1000).mul_(2)
    assert passes(traffic) == (0.0, 0.0)


def test_sparse_tensors_are_left_out() -> None:
    gradient = ones()
    with Traffic([gradient]) as traffic:
        gradient.add_(ones().to_sparse())
    assert passes(traffic) == CHANGED


def test_the_bytes_are_those_of_the_gradients_and_their_element_type() -> None:
    gradients = [torch.ones(10), torch.ones(4, dtype=torch.float16)]
    with Traffic(gradients) as traffic:
        gradients[0].mul_(2)
        gradients[1].sum()
    assert traffic.gradient_bytes == 48
    assert traffic.by_operator == {"mul_": Bytes(40, 40), "sum": Bytes(8, 0)}
    assert traffic.total == Bytes(48, 40)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_writes_gradients_only_where_it_divides_them(name: str) -> None:
    parameter = torch.nn.Parameter(ones())
    optimizer: torch.optim.Optimizer = FUSED[name]([parameter])
    for grad_scale, expected in ((None, READ), (torch.tensor(4.0), CHANGED)):
        parameter.grad = ones()
        if grad_scale is not None:
            optimizer.grad_scale = grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        with Traffic([parameter.grad]) as traffic:
            optimizer.step()
        assert passes(traffic) == expected
        assert torch.equal(parameter.grad, ones()) is (grad_scale is None)


def test_the_peak_is_of_tensors_that_live_at_one_time() -> None:
    with Traffic() as one_at_a_time:
        for _ in range(5):
            torch.ones(1000)
    assert one_at_a_time.peak_allocated == 4000
    with Traffic() as together:
        held = [torch.ones(1000) for _ in range(5)]
        held[0].view(10, 100).mul_(2)
        del held[1:]
        torch.ones(1000)
    assert together.peak_allocated == 20_000


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_measures_and_updates(name: str, clip: float | None) -> None:
    assert passes(count(loss_scaler(step_case(FUSED[name], clip)))) == (2.0, 1.0)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_with_clipping_writes_once_whatever_the_size_of_tensors(name: str) -> None:
    assert passes(count(loss_scaler(step_case(FUSED[name], 1.0, SMALL)))) == (2.0, 1.0)


def test_without_clipping_small_tensors_are_read_once_and_not_written() -> None:
    traffic = count(loss_scaler(step_case(FUSED["adamw"], None, SMALL)))
    assert by_operator(traffic) == {"_foreach_norm": (1.0, 0.0), "_fused_adamw_": CHANGED}


@pytest.mark.parametrize("shapes", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_step_with_clipping_measures_multiplies_and_updates(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert beyond_the_update(loss_scaler, step_case(OTHERS[name], 1.0, shapes)) == (2.0, 1.0)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_step_without_clipping_does_no_more(name: str) -> None:
    read, written = beyond_the_update(loss_scaler, step_case(OTHERS[name], None))
    assert (read <= 2.0, written) == (True, 1.0)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("name", FUSED)
def test_no_fused_step_takes_more_than_a_hundredth_of_the_gradients_memory(name: str, clip: float | None) -> None:
    traffic = count(loss_scaler(step_case(FUSED[name], clip)))
    assert traffic.peak_allocated <= traffic.gradient_bytes / 100
    assert traffic.host_reads == []


@pytest.mark.parametrize("name", FUSED)
def test_torchs_scaler_unscales_takes_the_norm_clips_and_updates(name: str) -> None:
    assert by_operator(count(grad_scaler(step_case(FUSED[name], 1.0)))) == {
        CHECK: CHANGED,
        "_foreach_norm": READ,
        "_foreach_mul_": CHANGED,
        f"_fused_{name}_": READ,
    }


@pytest.mark.parametrize("name", FUSED)
def test_torchs_scaler_writes_twice_even_where_nothing_is_clipped(name: str) -> None:
    assert passes(count(grad_scaler(step_case(FUSED[name], None)))) == (2.0, 2.0)


@pytest.mark.parametrize(("clip", "expected"), [(1.0, (3.0, 2.0)), (None, (1.0, 1.0))])
@pytest.mark.parametrize("name", OTHERS)
def test_torchs_scaler_does_the_same_before_any_other_update(name: str, clip: float | None, expected: Passes) -> None:
    assert beyond_the_update(grad_scaler, step_case(OTHERS[name], clip)) == expected


@pytest.mark.parametrize("name", FUSED | OTHERS)
@pytest.mark.parametrize("clip", [1.0, None])
def test_the_drop_in_never_moves_more_than_torchs_scaler(name: str, clip: float | None) -> None:
    case = step_case((FUSED | OTHERS)[name], clip)
    ours, torchs = count(grad_scaler(case, GradScaler)), count(grad_scaler(case))
    assert ours.passes_read <= torchs.passes_read
    assert ours.passes_written <= torchs.passes_written
    assert len(ours.host_reads) <= len(torchs.host_reads)
