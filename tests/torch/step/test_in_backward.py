"""Optimizers stepped in the backward pass: updates and scales of the steps after it, and what an overflow leaves."""

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, OPTIMIZERS, loss_of, same, small_model, state_tensors, weights
from tests.torch.sim import host
from tests.torch.step.test_launches import Launches
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, Histogram, LogMax, NoScaling, Static
from gradscale.engine.result import Status
from gradscale.torch import LossScaler, MasterWeights, ScaleStuck
from gradscale.torch.step import on_device

Make = Callable[[Any], torch.optim.Optimizer]

STEPS = 6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


class Run:
    """A small model that is trained in the backward pass, by an optimizer for each parameter."""

    def __init__(self, make: Make = sgd, policy: Any = None, **arguments: Any) -> None:
        self.model = small_model()
        self.optimizers = [make([each]) for each in self.model.parameters()]
        self.scaler = LossScaler(self.model, policy or Static(1024.0), **arguments)
        self.scaler.step_in_backward(*self.optimizers)

    def step(self, seed: int = 0, factor: float = 1.0) -> Any:
        self.scaler.backward(loss_of(self.model, seed) * factor)
        return self.scaler.last


class Poison(torch.autograd.Function):
    """Puts a number into the gradient that passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        grad.view(-1)[0] = ctx.value
        return grad, None


def poisoned_between_layers(model: nn.Sequential, value: float = INF) -> Tensor:
    """Returns a loss whose gradient overflows between the second layer, which comes first, and the first."""
    first, activation, second = model
    x = torch.ones(4, 4, device=next(first.parameters()).device)  # also in a thread of the backward pass, as a probe
    hidden: Tensor = Poison.apply(activation(first(x)), value)  # type: ignore[assignment]
    return second(hidden).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("each_its_own", [True, False], ids=["one for each parameter", "one for all"])
def test_weights_and_states_are_those_of_the_unscaled_run(name: str, each_its_own: bool) -> None:
    model, plain = small_model(), small_model()
    reference = OPTIMIZERS[name](plain.parameters())
    groups = [[each] for each in model.parameters()] if each_its_own else [list(model.parameters())]
    optimizers = [OPTIMIZERS[name](group) for group in groups]
    scaler = LossScaler(model, Static(2.0**16))
    scaler.step_in_backward(*optimizers)
    for seed in range(STEPS):
        scaler.backward(loss_of(model, seed))
        assert all(each.grad is None for each in model.parameters())
        assert scaler.last is not None
        assert scaler.last.status() is Status.APPLIED
        loss_of(plain, seed).backward()
        reference.step()
        reference.zero_grad()
    assert same(weights(model), weights(plain))
    found = {each: state for optimizer in optimizers for each, state in optimizer.state.items()}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        expected = reference.state.get(theirs, {})
        assert found.get(ours, {}).keys() == expected.keys()
        assert all(torch.equal(found[ours][key], value) for key, value in expected.items() if isinstance(value, Tensor))


@pytest.mark.parametrize(
    "policy",
    [Dynamic(init_scale=2.0**14, growth_interval=2), Headroom(), LogMax(), Histogram(period=2, edge=2.0**-12)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("name", ["adamw fused", "sgd foreach"])
def test_scales_are_those_of_steps_after_the_backward_pass(policy: Any, name: str) -> None:
    run, model = Run(OPTIMIZERS[name], policy), small_model()
    optimizer, scaler = OPTIMIZERS[name](model.parameters()), LossScaler(model, policy)
    for seed in range(24):
        factor = {5: INF, 11: 1e-5, 17: 1e6}.get(seed, 1.0)
        run.step(seed, factor)
        scaler.backward(loss_of(model, seed) * factor)
        result = scaler.step(optimizer)
        optimizer.zero_grad()
        assert run.scaler.last is not None
        assert run.scaler.last.status() is result.status()
        assert run.scaler.last.amax == result.amax or seed % 16 or result.skipped()
        assert run.scaler.loss_scale == scaler.loss_scale
        shares = [each.facts.seen().upper_share for each in (run.scaler.last, result)]
        # The kernel of the rule does not hand it on.
        assert shares[0] == pytest.approx(shares[1], rel=1e-5) or seed == 5 or scaler._rule.ahead is not None
    assert run.scaler.state_dict() == scaler.state_dict()
    assert run.scaler.metrics()["applied"] == 23
    assert same(weights(run.model), weights(model))


@pytest.mark.parametrize("name", ["adamw fused", "sgd foreach", "adamw foreach", "sgd fused"])
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_overflow_keeps_what_was_updated_before_it_and_updates_nothing_after_it(name: str, value: float) -> None:
    run = Run(OPTIMIZERS[name], Dynamic(init_scale=1024.0))
    run.step()
    before, states = weights(run.model), [state_tensors(each) for each in run.optimizers]
    run.scaler.backward(poisoned_between_layers(run.model, value))
    result = run.scaler.last
    assert result is not None
    changed = [not torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True)]
    assert changed == [False, False, True, True]
    assert all(same(state_tensors(each), old) for each, old in zip(run.optimizers[:2], states[:2], strict=True))
    assert result.status() is Status.OVERFLOW
    assert [(each.name, each.kind, each.count) for each in result.culprits()] == [
        (name, "nan" if math.isnan(value) else "inf", None) for name in ("0.bias", "0.weight")
    ]
    assert not result.applied
    assert run.scaler.loss_scale == 512.0
    assert run.step().status() is Status.APPLIED
    assert run.scaler.metrics()["skipped"] == 1


def test_a_loss_that_is_not_finite_updates_nothing_and_keeps_the_scale() -> None:
    run = Run(OPTIMIZERS["adamw fused"], Dynamic(init_scale=1024.0))
    before = weights(run.model)
    result = run.step(factor=NAN)
    assert result.status() is Status.NONFINITE_LOSS
    assert same(weights(run.model), before)
    assert run.scaler.loss_scale == 1024.0


def test_finite_gradients_of_a_loss_that_is_not_finite_are_not_applied() -> None:
    run = Run()
    before = weights(run.model)
    loss = loss_of(run.model) + torch.full((), INF)
    run.scaler.backward(loss)
    assert run.scaler.last is not None
    assert run.scaler.last.status() is Status.NONFINITE_LOSS
    assert same(weights(run.model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_that_overflows_when_it_is_divided_is_not_applied(dtype: torch.dtype) -> None:
    largest, changed = torch.finfo(dtype).max, list[bool]()
    for factor in (1.0, 1.0625):  # scaled, both are finite
        weight = nn.Parameter(torch.full((1,), 2.0**-4, dtype=dtype))
        scaler = LossScaler(policy=Static(2.0**-4), on_stuck="ignore")
        with pytest.warns(UserWarning, match="are FP16") if dtype is torch.float16 else nullcontext():
            scaler.step_in_backward(torch.optim.SGD([weight], lr=2.0**-8))
        scaler.backward((weight * largest).sum() + (weight * (largest * (factor - 1.0))).sum())
        assert scaler.last is not None
        assert scaler.last.loss_finite
        changed.append(weight.item() != 2.0**-4)
    assert changed == [True, False]


def test_a_run_is_resumed_bit_exactly() -> None:
    run = Run(OPTIMIZERS["adamw fused"], Headroom())
    for seed in range(4):
        run.step(seed)
    resumed = Run(OPTIMIZERS["adamw fused"], Headroom())
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.scaler.load_state_dict(run.scaler.state_dict())
    for ours, theirs in zip(resumed.optimizers, run.optimizers, strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for seed in range(4, 8):
        run.step(seed)
        resumed.step(seed)
    assert same(weights(resumed.model), weights(run.model))
    assert resumed.scaler.state_dict() == run.scaler.state_dict()


def test_a_stuck_run_raises_from_the_backward_pass() -> None:
    run = Run(OPTIMIZERS["adamw fused"], max_consecutive_skips=3)
    with pytest.raises(ScaleStuck, match=r"0\.weight \(nan\)"):  # noqa: PT012
        for _ in range(5):
            run.step(factor=INF)
    assert run.scaler.metrics()["skipped"] >= 3


def test_a_gradient_is_freed_before_the_next_is_made() -> None:
    model = small_model()
    alive, made = list[int](), list[weakref.ref[Tensor]]()

    def look(parameter: Tensor) -> None:
        alive.append(sum(each() is not None for each in made))
        assert parameter.grad is not None
        made.append(weakref.ref(parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[attr-defined]
    scaler = LossScaler(model, Static(8.0))
    scaler.step_in_backward(*(OPTIMIZERS["adamw fused"]([each]) for each in model.parameters()))
    scaler.backward(loss_of(model))
    scaler.backward(loss_of(model))
    assert alive == [0] * 8


def test_losses_scaled_by_hand_are_steps_too() -> None:
    run, other = Run(), Run()
    for seed in range(3):
        run.step(seed)
        other.scaler.scale(loss_of(other.model, seed)).backward()
    assert same(weights(run.model), weights(other.model))
    assert other.scaler.metrics()["applied"] == 3


def test_reentrant_checkpoints_are_one_step() -> None:
    from torch.utils.checkpoint import checkpoint

    run, plain = Run(), Run()
    x = torch.ones(4, 4, requires_grad=True)
    for model, scaler, body in (
        (run.model, run.scaler, lambda x: checkpoint(run.model[:2], x, use_reentrant=True)),
        (plain.model, plain.scaler, plain.model[:2]),
    ):
        scaler.backward(model[2](body(x)).square().mean())
        assert scaler.metrics()["applied"] == 1
        assert scaler.last is not None
        assert scaler.last.parameters == 4
    assert same(weights(run.model), weights(plain.model))


def test_masters_are_stepped_in_the_backward_pass() -> None:
    runs = []
    for in_backward in (True, False):
        model = small_model().half()
        optimizers = [MasterWeights(torch.optim.SGD([each], lr=0.5)) for each in model.parameters()]
        scaler = LossScaler(model, Static(64.0))
        if in_backward:
            scaler.step_in_backward(*optimizers)
        for _ in range(3):
            scaler.backward(model(torch.ones(4, 4).half()).float().square().mean())
            if not in_backward:
                scaler.step(*optimizers)
                model.zero_grad()
        runs.append(weights(model))
    assert same(*runs)


def test_buffers_go_back_where_a_parameter_was_skipped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    scaler = LossScaler(model, Static(64.0), on_stuck="ignore")
    scaler.protect_buffers()
    scaler.step_in_backward(*(sgd([each]) for each in model.parameters()))
    scaler.backward(loss_of(model))
    before = [each.clone() for each in model.buffers()]
    scaler.backward(loss_of(model) * INF)
    assert same(model.buffers(), before)
    scaler.backward(loss_of(model))
    assert not same(model.buffers(), before)


def test_without_scaling_hooks_only_step() -> None:
    run, plain = Run(policy=NoScaling()), Run()
    for seed in range(3):
        run.step(seed)
        plain.step(seed)
    assert same(weights(run.model), weights(plain.model))


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_a_pass_that_is_interrupted_leaves_nothing_for_the_next() -> None:
    run = Run(OPTIMIZERS["adamw fused"])
    handle = next(run.model.parameters()).register_hook(_interrupt)
    with pytest.raises(OSError, match="interrupted"):
        run.step()
    handle.remove()
    run.model.zero_grad()
    assert run.scaler.last is None
    result = run.step()
    assert result.status() is Status.APPLIED
    assert result.parameters == 4


def _interrupt(grad: Tensor) -> Tensor:
    raise OSError("interrupted")


def test_a_guarded_schedule_is_held_on_a_skip() -> None:
    run, calls = Run(), list[int]()
    guard = run.scaler.guard(lambda: calls.append(1))
    for factor in (1.0, INF, 1.0):
        run.step(factor=factor)
        guard.step()
    assert len(calls) == 2


def test_step_after_the_backward_pass_is_refused() -> None:
    run = Run()
    run.step()
    with pytest.raises(RuntimeError, match="those of `step_in_backward` into none"):
        run.scaler.step(*run.optimizers)


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_hooks_that_step_are_refused_and_named_the_way() -> None:
    model = small_model()
    scaler = LossScaler(model, Static(8.0))

    def stepped(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)  # type: ignore[attr-defined]
    optimizer = sgd(model.parameters())
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"call `scaler\.step_in_backward\(optimizer\)` once"):
        scaler.step(optimizer)
    scaler.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match=r"Received: 1 ranks, gradients of \. Leave out hooks that step"):
        scaler.backward(loss_of(model))


@pytest.mark.parametrize("by", ["retries", "closure"])
def test_retries_and_closures_are_refused_before_a_weight_changes(by: str) -> None:
    run = Run()
    before = weights(run.model)
    ways = {
        "retries": lambda: run.scaler.backward(loss_of(run.model), retries=2),
        "closure": run.scaler.closure(lambda: loss_of(run.model)),
    }
    with pytest.raises(RuntimeError, match=r"Leave out hooks that step, `retries` and `closure`"):
        ways[by]()
    assert same(weights(run.model), before)
    run.model.zero_grad()
    assert run.step().status() is Status.APPLIED


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_parameters_added_to_an_optimizer_are_refused() -> None:
    model = small_model()
    optimizer = sgd(model[2].parameters())
    scaler = LossScaler(model, Static(8.0))
    scaler.step_in_backward(optimizer)
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(RuntimeError, match="give parameters that were added an optimizer of their own"):
        scaler.backward((model(torch.ones(1, 4)) * extra).sum())


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_a_loss_that_is_not_scaled_is_refused() -> None:
    run = Run()
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        loss_of(run.model).backward()


def test_frozen_and_repeated_parameters_are_refused_by_name() -> None:
    model = small_model()
    scaler = LossScaler(model, Static(8.0))
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"require gradients.* Received: 0\.bias\."):
        scaler.step_in_backward(sgd(model.parameters()))
    with pytest.raises(ValueError, match=r"each once.* Received: 2\.weight"):
        scaler.step_in_backward(sgd(model[2].parameters()), sgd([model[2].weight]))
    scaler.step_in_backward(sgd(model[2].parameters()))
    with pytest.raises(ValueError, match=r"each once.* Received: 2\.weight, 2\.bias"):
        scaler.step_in_backward(sgd(model[2].parameters()))
    assert not model[0].weight._post_accumulate_grad_hooks
    scaler.step_in_backward(sgd([model[0].weight]))
    scaler.backward(loss_of(model))
    assert scaler.last is not None
    assert scaler.last.parameters == 3


def test_a_loss_that_was_scaled_before_another_step_gets_the_scale_of_its_own() -> None:
    run = Run(policy=Dynamic(init_scale=256.0, growth_interval=1))
    first, _, second, _ = run.model.parameters()
    losses = [run.scaler.scale(second.sum() * 3), run.scaler.scale(first.sum() * 5)]
    before = [second.detach().clone(), first.detach().clone()]
    for loss in losses:
        loss.backward()
    assert run.scaler.loss_scale == 1024.0
    assert same([second, first], [before[0] - 0.5 * 3, before[1] - 0.5 * 5])


def test_a_probe_after_skips_changes_nothing() -> None:
    run, before = Run(on_stuck="ignore"), weights(small_model())
    run.scaler.probe_after(2, lambda: poisoned_between_layers(run.model))
    run.step(factor=INF)
    run.step(factor=INF)
    run.step(factor=INF)
    assert run.scaler.last_probe is not None
    assert same(weights(run.model), before)
    assert run.scaler.metrics()["skipped"] >= 2


def test_a_gradient_penalty_is_part_of_the_step() -> None:
    run, model = Run(), small_model()
    optimizer, plain = sgd(model.parameters()), LossScaler(model, Static(1024.0))
    for scaler, body in ((run.scaler, run.model), (plain, model)):
        x = torch.ones(2, 4, requires_grad=True)
        loss = body(x).square().mean()
        (slope,) = scaler.grad(loss, x, create_graph=True)
        assert slope is not None
        scaler.backward(loss + slope.square().mean())
    plain.step(optimizer)
    assert same(weights(run.model), weights(model))
    assert run.scaler.metrics()["applied"] == 1


def test_a_copy_steps_nothing_in_the_backward_pass() -> None:
    run = Run()
    run.step()
    model, scaler = copy.deepcopy((run.model, run.scaler))
    optimizer = sgd(model.parameters())
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    run.step()
    assert same(weights(model), weights(run.model))
    scaler.step_in_backward(optimizer)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    run.step()
    assert same(weights(model), weights(run.model))


@pytest.mark.simulated_only
@pytest.mark.parametrize("policy", ["dynamic", "auto"])
def test_fused_optimizers_synchronize_never_and_others_once_for_each_parameter(policy: str) -> None:
    fused, other = Run(OPTIMIZERS["adamw fused"], policy), Run(OPTIMIZERS["sgd foreach"], policy)
    for run in (fused, other):
        run.step()
    with host.busy(), host.waits() as found:
        for seed in range(4):
            fused.scaler.backward(loss_of(fused.model, seed))
    assert found.reads == found.uploads == []
    with host.busy(), host.waits() as found:
        for seed in range(4):
            other.scaler.backward(loss_of(other.model, seed))
    assert len(found.reads) == 4 * (4 + 1)
    assert fused.scaler.last is not None
    assert fused.scaler.last.applied


@pytest.mark.simulated_only
@pytest.mark.parametrize("policy", ["dynamic", "auto"])
def test_a_hook_of_a_fused_optimizer_launches_five_operators(policy: str) -> None:
    def launched(layers: int, *, scaled: bool) -> int:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
        optimizers = {each: torch.optim.AdamW([each], fused=True) for each in model.parameters()}
        scaler = LossScaler(model, policy if scaled else NoScaling())
        scaler.step_in_backward(*optimizers.values())
        counted = Launches()
        scaler.backward(model(torch.ones(1, 2)).sum())
        with counted:
            scaler.backward(model(torch.ones(1, 2)).sum())
        return counted.found.total() - counted.found["new_empty"]

    extra = [launched(layers, scaled=True) - launched(layers, scaled=False) for layers in (1, 11)]
    assert (extra[1] - extra[0]) / 10 == 5
    assert extra[0] <= 5 + 19


@pytest.mark.simulated_only
def test_the_rule_of_the_host_gives_the_same_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Run(OPTIMIZERS["adamw fused"], Headroom()), Run(OPTIMIZERS["adamw fused"], Headroom())
    for seed in range(12):
        run.step(seed, INF if seed == 5 else 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(on_device, "refusal", lambda policy, device: "no kernel")
            other.step(seed, INF if seed == 5 else 1.0)
    assert run.scaler._rule.ahead is not None
    assert other.scaler._rule.ahead is None
    assert run.scaler.state_dict() == other.scaler.state_dict()
    assert same(weights(run.model), weights(other.model))
