"""`unscaled` for edits of one's own, `grad` for gradient penalties, and what an overflow in either leads to."""

from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, loss_of, poison, same, small_model, weights
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


def setup(policy: Policy | None = None) -> tuple[Any, torch.optim.Optimizer, LossScaler]:
    model = small_model()
    scaler = LossScaler(model, policy or Dynamic(init_scale=1024.0))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), scaler


def true_grads(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_inside_unscaled_the_gradients_are_true() -> None:
    model, optimizer, scaler = setup()
    expected = true_grads(model)
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        assert same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_edits_reach_the_weights_and_gradients_are_not_divided_again(fused: bool, clip_norm: float | None) -> None:
    def run(policy: Policy) -> list[Tensor]:
        model: Any = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = LossScaler(model, policy)
        for step in range(3):
            scaler.backward(loss_of(model, step))
            with scaler.unscaled(optimizer):
                for layer in (model[0], model[2]):
                    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
                model[0].weight.grad.add_(0.01)
            scaler.step(optimizer, clip_norm=clip_norm)
            optimizer.zero_grad()
        return weights(model)

    assert same(run(Static(1024.0)), run(Static(1.0)))


def test_a_second_unscaled_does_not_divide_again() -> None:
    model, optimizer, scaler = setup()
    expected = true_grads(model)
    scaler.backward(loss_of(model))
    for _ in range(2):
        with scaler.unscaled(optimizer):
            pass
    assert same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_overflow_before_the_edits_skips_the_step_even_if_they_hide_it(bad: float) -> None:
    model, optimizer, scaler = setup()
    before = weights(model)
    scaler.backward(loss_of(model))
    poison(model[0].weight, bad)
    with scaler.unscaled(optimizer):
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.grad)
    result = scaler.step(optimizer)
    assert result.status() == "overflow"
    assert result.next_scale.item() == 512.0
    assert same(weights(model), before)


def test_a_loss_that_is_not_finite_still_takes_precedence_after_unscaled() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model) * NAN)
    with scaler.unscaled(optimizer):
        pass
    result = scaler.step(optimizer)
    assert result.status() == "nonfinite_loss"
    assert result.next_scale.item() == 1024.0


def test_edits_that_are_not_finite_are_not_applied() -> None:
    model, optimizer, scaler = setup()
    before = weights(model)
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        poison(model[0].weight)
    assert scaler.step(optimizer).skipped()
    assert same(weights(model), before)


def test_edits_that_raise_leave_unscaled_gradients_that_can_still_be_stepped() -> None:
    model, optimizer, scaler = setup()
    expected, its_optimizer, plain = setup(Static(1.0))
    scaler.backward(loss_of(model))
    with pytest.raises(ZeroDivisionError), scaler.unscaled(optimizer):
        raise ZeroDivisionError
    scaler.step(optimizer)
    plain.backward(loss_of(expected))
    plain.step(its_optimizer)
    assert same(weights(model), weights(expected))


def test_gradients_that_could_not_all_be_unscaled_cannot_be_stepped() -> None:
    model, optimizer, scaler = setup(Static(1024.0))
    scaler.backward(loss_of(model))
    before, last = weights(model), model[2].bias
    last.data = last.data.double()  # divided after the others
    last.grad = last.new_ones(()).expand(last.shape)
    with pytest.raises(RuntimeError, match="single memory location"), scaler.unscaled(optimizer):
        raise AssertionError
    last.data, last.grad = last.data.float(), None
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        scaler.step(optimizer)
    assert same(weights(model), before)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_unscaled_gradients_can_be_cleared_and_the_loop_continued() -> None:
    model, optimizer, scaler = setup()
    expected, its_optimizer, plain = setup()
    scaler.backward(loss_of(model, seed=1))
    with pytest.raises(KeyboardInterrupt), scaler.unscaled(optimizer):
        raise KeyboardInterrupt
    optimizer.zero_grad()
    for each, its, their in ((model, optimizer, scaler), (expected, its_optimizer, plain)):
        their.backward(loss_of(each))
        their.backward(loss_of(each, seed=2))
        assert not their.step(its).skipped()
    assert same(weights(model), weights(expected))


@pytest.mark.not_simulated("errors in hooks, which torch loses on a device in Python")
def test_a_backward_pass_after_unscaled_is_refused_before_it_adds_anything() -> None:
    model, optimizer, scaler = setup()
    expected = true_grads(model)
    early = scaler.scale(loss_of(model))
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        pass
    for late in (lambda: scaler.backward(loss_of(model)), early.backward):
        with pytest.raises(RuntimeError, match=r"begun after `scaler\.unscaled\(\.\.\.\)`"):
            late()
    assert same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected)
    assert not scaler.step(optimizer).skipped()


def test_all_optimizers_of_a_step_must_be_unscaled_or_none() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    of_a, of_b = torch.optim.SGD(a.parameters()), torch.optim.SGD(b.parameters())
    scaler = LossScaler([a, b], Static(4.0))
    scaler.backward(a(b(torch.ones(1, 1))).sum())
    with scaler.unscaled(of_a):
        pass
    with pytest.raises(RuntimeError, match=r"needs all its optimizers inside the same `unscaled\(\.\.\.\)` block"):
        scaler.step(of_a, of_b)
    with scaler.unscaled(of_b):
        pass
    assert not scaler.step(of_a, of_b).skipped()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_group_added_after_unscaled_is_unscaled_by_the_step(fused: bool, inside: bool) -> None:
    p, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(1024.0))
    scaler.backward((p + 2 * late).sum())
    with scaler.unscaled(optimizer):
        if inside:
            optimizer.add_param_group({"params": [late]})
    if not inside:
        optimizer.add_param_group({"params": [late]})
    assert not scaler.step(optimizer).skipped()
    assert (p.tolist(), late.tolist()) == ([-1.0, -1.0], [-2.0, -2.0])


def test_a_group_added_after_unscaled_is_checked_as_all_others() -> None:
    p, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler(policy=Dynamic(init_scale=1024.0))
    scaler.backward((p + 2 * late).sum())
    poison(late)
    with scaler.unscaled(optimizer):
        optimizer.add_param_group({"params": [late]})
    assert scaler.step(optimizer).status() == "overflow"
    assert p.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_the_edits_make_or_replace_is_not_divided(fused: bool) -> None:
    p, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, without], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(1024.0))
    scaler.backward(p.sum())
    with scaler.unscaled(optimizer):
        p.grad = torch.full((2,), 3.0)
        without.grad = torch.full((2,), 5.0)
    scaler.step(optimizer)
    assert (p.tolist(), without.tolist()) == ([-3.0, -3.0], [-5.0, -5.0])


def test_unscaled_gradients_cleared_in_place_may_be_followed_by_a_backward_pass() -> None:
    model, optimizer, scaler = setup()
    expected, its_optimizer, plain = setup()
    scaler.backward(loss_of(model, seed=1))
    with scaler.unscaled(optimizer):
        pass
    optimizer.zero_grad(set_to_none=False)
    for each, its, their in ((model, optimizer, scaler), (expected, its_optimizer, plain)):
        their.backward(loss_of(each))
        assert not their.step(its).skipped()
    assert same(weights(model), weights(expected))


def test_unscaled_before_the_backward_pass_is_refused() -> None:
    _, optimizer, scaler = setup()
    with pytest.raises(RuntimeError, match="none was scaled since the last step"), scaler.unscaled(optimizer):
        pass


def test_unscaled_without_scaling_changes_nothing() -> None:
    model, optimizer, scaler = setup(NoScaling())
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        pass
    assert not scaler.step(optimizer).skipped()


def penalty(scaler: LossScaler, model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model)
    (grad,) = scaler.grad(model(x).sum(), x, create_graph=True)
    assert grad is not None
    return loss + grad.square().sum()


def test_the_gradients_of_a_penalty_are_unscaled_and_differentiable() -> None:
    def run(policy: Policy) -> list[Tensor]:
        model, optimizer, scaler = setup(policy)
        for step in range(3):
            x = torch.full((2, 4), step / 4.0, requires_grad=True)
            scaler.backward(penalty(scaler, model, x))
            assert not scaler.step(optimizer).skipped()
            optimizer.zero_grad()
        return weights(model)

    for found, expected in zip(run(Static(1024.0)), run(NoScaling()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_unused_inputs_have_no_gradient() -> None:
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    grad, missing = LossScaler(policy=Static(4.0)).grad(x.sum() * 3, [x, y], allow_unused=True)
    assert grad is not None
    assert grad.item() == 3.0
    assert missing is None


def test_half_gradients_of_inputs_are_widened_before_they_vanish() -> None:
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (grad,) = LossScaler(policy=Static(2.0**20)).grad((x.float() * 2.0**-30).sum(), x)
    assert grad is not None
    assert grad.dtype == torch.float32
    assert grad.item() == 2.0**-30


def test_an_overflow_in_the_gradients_of_a_penalty_lowers_the_scale_and_does_not_count_as_a_bad_loss() -> None:
    model, optimizer, scaler = setup(Dynamic(init_scale=2.0**20))
    before = weights(model)
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (grad,) = scaler.grad((x.float() * 2.0).sum(), x)
    assert grad is not None
    assert torch.isinf(grad).all()
    scaler.backward(loss_of(model) + grad.sum())
    result = scaler.step(optimizer)
    assert result.status() == "overflow"
    assert result.next_scale.item() == 2.0**19
    assert same(weights(model), before)


@pytest.mark.parametrize("bad_first", [True, False])
@pytest.mark.parametrize("batches", [2, 40, 100])
def test_what_comes_first_is_the_cause_in_any_number_of_micro_batches_with_penalties(
    batches: int, bad_first: bool
) -> None:
    model, optimizer, scaler = setup(Dynamic(init_scale=2.0**20))
    if bad_first:
        scaler.backward(loss_of(model) * NAN)
    for _ in range(batches):
        x = torch.ones(1, dtype=torch.float16, requires_grad=True)
        (grad,) = scaler.grad((x.float() * 2.0).sum(), x)
        assert grad is not None
        scaler.backward(loss_of(model) + grad.sum())
    assert scaler.step(optimizer).status() == ("nonfinite_loss" if bad_first else "overflow")


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_loss_inside_a_penalty_takes_precedence(bad: float) -> None:
    model, optimizer, scaler = setup()
    x = torch.ones(1, 4, requires_grad=True)
    (grad,) = scaler.grad(model(x).sum() * bad, x)
    assert grad is not None
    scaler.backward(loss_of(model) + grad.sum())
    result = scaler.step(optimizer)
    assert result.status() == "nonfinite_loss"
    assert result.next_scale.item() == 1024.0


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_loss_of_a_penalty_that_is_given_up_does_not_skip_the_next_batch(bad: float) -> None:
    model, optimizer, scaler = setup()
    x = torch.ones(1, 4, requires_grad=True)
    scaler.grad(model(x).sum() * bad, x)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).status() == "applied"


def test_an_overflow_of_a_penalty_that_is_given_up_lowers_the_scale() -> None:
    """A loop that gives up such batches would give up every batch at the same scale."""
    model, optimizer, scaler = setup(Dynamic(init_scale=2.0**20))
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    scaler.grad((x.float() * 2.0).sum(), x)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    result = scaler.step(optimizer)
    assert (result.status(), result.next_scale.item()) == ("overflow", 2.0**19)


def test_without_scaling_grad_is_autograds_own() -> None:
    x = torch.ones(1, requires_grad=True)
    (grad,) = LossScaler(policy=NoScaling()).grad(x.sum() * 3, x)
    assert grad is not None
    assert grad.item() == 3.0


@pytest.mark.not_simulated("sparse tensors")
def test_the_gradients_of_a_penalty_may_be_sparse() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    scaler = LossScaler(embedding, Static(1024.0))
    (grad,) = scaler.grad(embedding(torch.tensor([1, 1, 3])).sum(), embedding.weight)
    assert grad is not None
    assert grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def _abandon_a_batch(model: nn.Module, scaler: LossScaler) -> None:
    """Gives up a batch whose retries have lowered the scale of its window, to no avail."""
    poisoned = next(model.parameters())
    hook = poisoned.register_hook(lambda grad: grad * INF)
    scaler.backward(loss_of(model), retries=2)
    hook.remove()
    model.zero_grad()


def test_the_gradients_of_a_penalty_are_unscaled_after_an_abandoned_batch() -> None:
    model, _, scaler = setup()
    _abandon_a_batch(model, scaler)
    x = torch.ones(3, requires_grad=True)
    (grad,) = scaler.grad(x.sum(), x)
    assert grad is not None
    assert grad.tolist() == [1.0, 1.0, 1.0]


def test_an_overflow_in_the_gradients_of_a_penalty_skips_the_step_after_an_abandoned_batch() -> None:
    model, optimizer, scaler = setup(Dynamic(init_scale=2.0**20))
    _abandon_a_batch(model, scaler)
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    scaler.grad((x.float() * 2.0).sum(), x)
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).status() == "overflow"
