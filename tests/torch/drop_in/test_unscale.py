"""How the drop-in divides and checks gradients of every kind."""

from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import OURS, TORCH, give, grad_of, last_of, parameter, ready
from tests.torch.helpers import poison
from torch import Tensor, nn

from gradscale.torch import GradScaler

INF, NAN = torch.inf, torch.nan

LAYOUTS = {
    "contiguous": lambda grad: grad,
    "transposed": lambda grad: grad.t(),
    "columns": lambda grad: grad[:, :5],
    "every other row": lambda grad: grad[::2],
}


def unscale(kind: Any, grads: list[Tensor], factor: float, allow_fp16: bool = True) -> tuple[list[Tensor], float]:
    """Returns the gradients and the summed flags that `_unscale_grads_` makes of them."""
    owners = [nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for owner, grad in zip(owners, grads, strict=True):
        owner.grad = grad
    flags = kind("cpu")._unscale_grads_(
        torch.optim.SGD(owners, lr=1.0), torch.full((1,), factor), torch.zeros(1), allow_fp16
    )
    assert all(flag.shape == (1,) for flag in flags.values())
    return [owner.grad for owner in owners if owner.grad is not None], sum(flag.item() for flag in flags.values())


@pytest.mark.parametrize("kind", [OURS, TORCH])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_any_layout_are_divided_and_checked(layout: Any, bad: float | None, kind: Any) -> None:
    plain = torch.full((20, 20), 4.0)
    odd = torch.full((20, 20), 4.0)
    if bad is not None:
        odd[2, 2] = bad
    grads, found = unscale(kind, [plain, layout(odd)], 0.25)
    assert found == (0.0 if bad is None else 1.0)
    assert torch.equal(grads[0], torch.ones(20, 20))
    if bad is None:
        assert torch.equal(grads[1], torch.ones_like(grads[1]))


@pytest.mark.parametrize("kind", [OURS, TORCH])
@pytest.mark.parametrize("where", [None, 0, 1, 2, 3])
def test_inf_is_found_in_any_of_mixed_gradients(where: int | None, kind: Any) -> None:
    four = torch.full((20, 20), 4.0)
    grads = [four.clone(), four.clone()[:, :5], four.half(), four.bfloat16()]
    if where is not None:
        grads[where][2, 2] = INF
    grads, found = unscale(kind, grads, 0.25)
    assert found == (0.0 if where is None else 1.0)
    assert all((grad.flatten()[0] == 1).item() for grad in grads)


@pytest.mark.not_simulated("sparse tensors")
@pytest.mark.parametrize("kind", [OURS, TORCH])
@pytest.mark.parametrize(("last", "found"), [(64.0, 0.0), (INF, 1.0), (NAN, 1.0)])
def test_sparse_gradients_are_divided_and_checked(last: float, found: float, kind: Any) -> None:
    sparse = sparse_of([[0, 1, 1], [2, 0, 2]], [16.0, 32.0, last])
    (grad,), flag = unscale(kind, [sparse], 0.25, allow_fp16=False)
    assert flag == found
    if not found:
        assert torch.equal(grad.to_dense(), sparse_of([[0, 1, 1], [2, 0, 2]], [4.0, 8.0, 16.0]).to_dense())


@pytest.mark.not_simulated("sparse tensors")
@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_duplicates_of_a_sparse_fp16_gradient_are_added_before_the_check(kind: Any) -> None:
    sparse = sparse_of([[0, 1, 0], [2, 0, 2]], [64000.0, 32.0, 64000.0], torch.float16)
    (grad,), flag = unscale(kind, [sparse], 0.25)
    assert flag == 1.0
    assert grad.is_coalesced()


@pytest.mark.not_simulated("sparse tensors")
@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_duplicates_of_a_sparse_float32_gradient_are_left_to_the_optimizer(kind: Any) -> None:
    (grad,), flag = unscale(kind, [sparse_of([[0, 0], [2, 2]], [4.0, 4.0])], 0.25)
    assert flag == 0.0
    assert not grad.is_coalesced()
    assert grad._values().tolist() == [1.0, 1.0]


def sparse_of(indices: list[list[int]], values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    at = torch.tensor(indices)
    return torch.sparse_coo_tensor(at, torch.tensor(values, dtype=dtype), (2, 3), check_invariants=True)


def test_flag_that_is_passed_in_is_not_written_to() -> None:
    owner, found_inf = parameter(), torch.zeros(1)
    give((owner, INF))
    flags = GradScaler("cpu")._unscale_grads_(torch.optim.SGD([owner], lr=1.0), torch.ones(1), found_inf, False)
    assert (found_inf.item(), [flag.item() for flag in flags.values()]) == (0.0, [1.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_other_types_train(dtype: torch.dtype, fused: bool) -> None:
    owner = parameter(dtype=dtype)
    optimizer = torch.optim.SGD([owner], lr=0.5, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 8.0))
    scaler.step(optimizer)
    assert owner.tolist() == [0.5] * 3


def test_conjugated_view_of_a_complex_gradient_is_divided_in_place() -> None:
    owner = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = ready(GradScaler("cpu", init_scale=4.0))
    give((owner, torch.full((3,), 4 + 8j, dtype=torch.complex64).conj()))
    scaler.step(optimizer)
    assert owner.tolist() == [-1 + 2j] * 3


def test_fp16_gradients_are_refused_and_the_note_names_the_parameters() -> None:
    owner = parameter(dtype=torch.float16)
    give((owner, 1.0))
    scaler = ready(GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.") as caught:
        scaler.unscale_(torch.optim.SGD([("embedding.weight", owner)], lr=0.1))
    assert caught.value.__notes__ == [
        "FP16 parameters: embedding.weight. Keep parameters in float32 and compute under `torch.autocast`; or wrap "
        "the optimizer, as `gradscale.torch.MasterWeights(optimizer, grad_fp32=True)`, for float32 gradients."
    ]
    assert grad_of(owner).tolist() == [1.0] * 3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fp16_gradients_of_a_fused_optimizer_are_taken(momentum: float) -> None:
    """With dampening, the first step of a fused SGD cannot be left to its kernel; FP16 is no reason for an error."""
    owner = parameter(dtype=torch.float16)
    dampening = 0.5 if momentum else 0.0
    optimizer = torch.optim.SGD([owner], lr=0.5, momentum=momentum, dampening=dampening, fused=True)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    for grad in (INF, 8.0):
        give((owner, grad))
        scaler.step(optimizer)
        scaler.update(8.0)
    assert owner.tolist() == [0.5] * 3


def test_error_for_an_optimizer_without_gradients_names_the_likely_cause() -> None:
    scaler = ready(GradScaler("cpu"))
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded for this optimizer\.") as caught:
        scaler.step(torch.optim.SGD([parameter(), parameter()], lr=0.1))
    assert caught.value.__notes__[0].startswith("None of the 2 parameters of this SGD has a gradient: frozen, unused")


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_fused_optimizer_without_gradients_steps_and_update_wants_another(kind: Any) -> None:
    scaler = ready(kind("cpu"))
    scaler.step(torch.optim.SGD([parameter()], lr=0.1, fused=True))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()


LARGE = {"small tensors": (3,), "large tensors": (300, 300)}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("fused", [False, True])
def test_largest_finite_gradient_is_no_overflow(fused: bool, shape: tuple[int, ...]) -> None:
    owner = parameter(shape=shape)
    optimizer = torch.optim.SGD([owner], lr=1e-38, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=1.0))
    give((owner, torch.finfo(torch.float32).max))
    scaler.step(optimizer)
    scaler.update()
    assert not last_of(scaler).skipped()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("fused", [False, True])
def test_one_bad_number_anywhere_skips_the_step(fused: bool, shape: tuple[int, ...], bad: float) -> None:
    owner, other = parameter(shape=shape), parameter(shape=shape)
    optimizer = torch.optim.SGD([owner, other], lr=0.1, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=4.0))
    give((owner, 4.0), (other, 4.0))
    poison(other, bad, at=-1)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(owner.detach(), torch.ones(shape))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [False, True])
def test_explicit_unscale_and_step_divide_once(fused: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, 8.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert grad_of(owner).tolist() == [1.0] * 3
    assert owner.tolist() == [0.5] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_found_by_explicit_unscale_still_skips_the_step(fused: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.AdamW([owner], lr=0.5, fused=fused)
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((owner, INF))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([owner], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == [1.0] * 3
    assert scaler.get_scale() == 4.0


def test_scale_written_behind_the_scalers_back_is_noticed() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(GradScaler("cpu"))
    scaler._scale.fill_(2.0**-20)  # type: ignore[union-attr]
    give((owner, 1e35))
    scaler.step(optimizer)
    assert last_of(scaler).skipped()


@pytest.mark.parametrize("moved", ["by hand", "behind its back before an update"])
def test_scale_that_falls_below_one_is_noticed_however_it_got_there(moved: str) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(GradScaler("cpu"))
    give((owner, 1.0))
    scaler.step(optimizer)
    if moved == "by hand":
        scaler.update(2.0**-20)
    else:
        scaler._scale.fill_(2.0**-20)  # type: ignore[union-attr]
        scaler.update()
    give((owner, 1e35))
    scaler.step(optimizer)
    assert last_of(scaler).skipped()


def test_gradient_that_the_users_own_grad_scale_makes_infinite_skips_the_step() -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, fused=True)
    scaler = ready(GradScaler("cpu", init_scale=2.0))
    optimizer.grad_scale = torch.tensor(2.0**-20)  # type: ignore[attr-defined]
    give((owner, 1e35))
    scaler.step(optimizer)
    assert owner.tolist() == [1.0] * 3


def test_two_optimizers_may_share_parameters_that_have_no_gradient() -> None:
    frozen, first, second = parameter(), parameter(), parameter()
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    give((first, 8.0), (second, 8.0))
    for owner in (first, second):
        scaler.step(torch.optim.SGD([frozen, owner], lr=0.5))
    assert (first.tolist(), second.tolist(), frozen.tolist()) == ([0.5] * 3, [0.5] * 3, [1.0] * 3)


def test_two_optimizers_may_share_parameters_in_turns() -> None:
    owner = parameter()
    scaler = ready(GradScaler("cpu", init_scale=8.0))
    for optimizer in (torch.optim.SGD([owner], lr=0.5), torch.optim.SGD([owner], lr=0.5)):
        give((owner, 8.0))
        scaler.step(optimizer)
        scaler.update()
    assert owner.tolist() == [0.0] * 3


def test_two_optimizers_may_share_parameters_once_another_loss_was_scaled() -> None:
    owner = parameter()
    first, second = (torch.optim.SGD([owner], lr=0.5, fused=True) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=8.0)
    for optimizer in (first, second):
        optimizer.zero_grad()
        scaler.scale(owner.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == [0.0] * 3


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 100.0}, {"clip_value": 100.0}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_made_after_unscale_are_refused_where_there_were_none_before(fused: bool, clip: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=1.0, fused=fused)
    scaler = ready(GradScaler("cpu"))
    scaler.unscale_(optimizer)
    give((owner, INF))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer") as caught:
        scaler.step(optimizer, **clip)
    assert caught.value.__notes__ == [
        "Its gradients were made after `unscale_`. Call `unscale_` after the backward pass."
    ]
    assert owner.tolist() == [1.0, 1.0, 1.0]


def leave_out_a_step(scaler: Any, fused: bool) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    owner = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([owner], lr=1.0, fused=fused)
    scaler.scale(owner.sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    return owner, optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_replace_unscaled_ones_are_refused(fused: bool) -> None:
    scaler: Any = TORCH("cpu", init_scale=8.0)
    owner, optimizer = leave_out_a_step(scaler, fused)
    scaler.scale(owner.sum()).backward()
    scaler.step(optimizer)
    assert owner.tolist() == [-7.0, -7.0], "torch's own: scaled gradients are applied"
    scaler = OURS("cpu", init_scale=8.0)
    owner, optimizer = leave_out_a_step(scaler, fused)
    scaler.scale(owner.sum()).backward()
    with pytest.raises(RuntimeError, match=r"they are still scaled. .* call `update\(\)` in its place"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="has already been called") as caught:
        scaler.unscale_(optimizer)
    assert "call `update()` in its place" in caught.value.__notes__[0]
    assert owner.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_takes_the_place_of_a_step_that_is_left_out(fused: bool) -> None:
    scaler: Any = OURS("cpu", init_scale=8.0)
    owner, optimizer = leave_out_a_step(scaler, fused)
    scaler.update()
    scaler.scale(owner.sum()).backward()
    scaler.step(optimizer)
    assert owner.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
@pytest.mark.parametrize("twice", ["a parameter", "a gradient"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_gradient_that_is_held_twice_is_divided_once(twice: str, unscales: bool, fused: bool) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, p] if twice == "a parameter" else [p, q], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    q.grad = p.grad
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert p.tolist() == ([-2.0, -2.0] if twice == "a parameter" else [-1.0, -1.0])
    assert q.tolist() == ([0.0, 0.0] if twice == "a parameter" else [-1.0, -1.0])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_non_finite_parameters_are_named_where_another_is_listed_twice() -> None:
    p, bad = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([("p", p), ("p", p), ("bad", bad)], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p + bad * torch.inf).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last is not None
    assert [culprit.name for culprit in scaler.last.culprits()] == ["bad"]


def test_one_gradient_of_two_optimizers_is_refused_as_a_shared_parameter_is() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    a, b = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    q.grad = p.grad
    scaler.unscale_(a)
    with pytest.raises(RuntimeError, match="may belong to one optimizer"):
        scaler.unscale_(b)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_gradient_that_is_held_twice_by_a_fused_optimizer_and_overflows_skips_the_step(bad: float) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, q], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * bad).sum()).backward()
    q.grad = p.grad
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == q.tolist() == [0.0, 0.0]
    assert last_of(scaler).skipped()
    assert scaler.get_scale() == 512.0


def test_a_fused_step_that_raised_is_repeated_without_a_second_division() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, q], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    q.grad = p.grad

    def fail(*_: Any) -> None:
        hook.remove()
        raise InterruptedError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(InterruptedError):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_group_added_after_unscale_is_refused_while_it_has_scaled_gradients(fused: bool) -> None:
    p, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p + late).sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(RuntimeError, match=r"still scaled: param_groups\[1\]\.params\[0\]\. Add groups before"):
        scaler.step(optimizer)
    assert p.tolist() == late.tolist() == [0.0, 0.0]
    late.grad = None
    scaler.step(optimizer)
    assert (p.tolist(), late.tolist()) == ([-1.0, -1.0], [0.0, 0.0])


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_fp16_gradients_may_be_checked_without_being_divided(kind: Any) -> None:
    """As an optimizer whose `step` takes the scaler does, and divides them in its own kernel."""
    owner = parameter(dtype=torch.float16)
    scaler, optimizer = ready(kind("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, torch.inf))
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
