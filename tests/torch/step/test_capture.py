"""A whole step as a CUDA graph would capture it: the same operators at every step, on the same memory, and no host.

A graph is recorded here as the list of operators that reach the simulated device, and replayed by running them again on
the memory that they had: what the host computed meanwhile stays as it was.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, OPTIMIZERS, loss_of, small_model
from tests.torch.sim import host
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale import Dynamic, Headroom, Histogram, Policy, Status
from gradscale.engine.health import ScaleStuck
from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.simulated_only

POLICIES: list[Policy] = [Headroom(), Dynamic(init_scale=300.0, growth_interval=3, growth_factor=2.0)]
OVERFLOWS, BAD_LOSSES = {0, 5, 6, 7, 20, 33}, {9, 21}
STEPS, WARM_UP = 40, 3


class Graph(TorchDispatchMode):
    """Records the operators that reach the device, and runs them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_record_function" in func._schema.name:  # for profilers
            return made
        self.calls.append((func, args, kwargs or {}, [each for each in tree_leaves(made) if isinstance(each, Tensor)]))
        return made

    @property
    def operators(self) -> list[Any]:
        """What was run, with the shapes and the numbers that it was given."""
        return [
            (str(func), [tuple(x.shape) if isinstance(x, Tensor) else str(x) for x in tree_leaves((args, kwargs))])
            for func, args, kwargs, _ in self.calls
        ]

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportAttributeAccessIssue]
            for func, args, kwargs, kept in self.calls:
                made = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
                for target, source in zip(kept, made, strict=True):
                    # A view, or what was written in place, is in the same memory already.
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)


class Run:
    """A small model on static inputs, stepped by a scaler that can be captured, or by one that cannot."""

    def __init__(self, policy: Policy, kind: str = "LossScaler", *, capturable: bool = True, **arguments: Any) -> None:
        self.model = small_model()
        self.optimizer = OPTIMIZERS["adamw fused"](self.model.parameters())
        self.kind, self.arguments = kind, arguments
        settings: Any = {"policy": policy, "on_stuck": "ignore", "capturable": capturable}
        self.scaler: Any = LossScaler(self.model, **settings) if kind == "LossScaler" else GradScaler("sim", **settings)
        self.inputs = torch.zeros(8, next(self.model.parameters()).shape[1])
        self.bad_loss, self.bad_gradient = torch.ones(()), torch.ones(())
        next(self.model.parameters()).register_hook(lambda grad: grad * self.bad_gradient)

    def load(self, number: int) -> None:
        generator = torch.Generator("cpu").manual_seed(number)
        self.inputs.copy_(torch.randn(self.inputs.shape, generator=generator, device="cpu"))
        self.bad_loss.fill_(INF if number in BAD_LOSSES else 1.0)
        self.bad_gradient.fill_(INF if number in OVERFLOWS else 1.0)

    def step(self) -> Any:
        scaler, loss = self.scaler, self.model(self.inputs).square().mean() * self.bad_loss
        if self.kind == "LossScaler":
            scaler.backward(loss)
            return scaler.step(self.optimizer, **self.arguments)
        scaler.scale(loss).backward()
        if self.kind == "torch's calls":
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
        scaler.step(self.optimizer, **self.arguments)
        scaler.update()
        return scaler.last

    def eager(self, number: int) -> Any:
        self.load(number)
        result = self.step()
        self.optimizer.zero_grad()
        return result

    def captured(self, number: int) -> tuple[Graph, Any]:
        self.load(number)
        with host.waits(forbid=True) as waits, Graph() as graph:
            result = self.step()
        assert waits == host.Waits()
        self.gradients = [each.grad for each in self.model.parameters()]  # as a graph keeps its memory
        self.optimizer.zero_grad()
        return graph, result

    @property
    def state(self) -> Any:
        return self.scaler._rule.state

    @property
    def weights(self) -> list[Tensor]:
        return [each.detach().cpu() for each in self.model.parameters()]


WAYS: dict[str, Callable[..., Run]] = {
    "LossScaler": lambda policy, **settings: Run(policy, **settings),
    "LossScaler, clipped": lambda policy, **settings: Run(policy, clip_norm=0.5, **settings),
    "drop-in": lambda policy, **settings: Run(policy, "drop-in", **settings),
    "drop-in, clipped": lambda policy, **settings: Run(policy, "drop-in", clip_norm=0.5, **settings),
    "torch's calls": lambda policy, **settings: Run(policy, "torch's calls", **settings),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_step_runs_the_same_operators_and_the_host_does_nothing(policy: Policy, way: str) -> None:
    run = WAYS[way](policy)
    for number in range(WARM_UP):
        run.eager(number)
    first = run.captured(WARM_UP)[0].operators
    assert len(first) > 20
    for number in range(WARM_UP, WARM_UP + 64):
        assert run.captured(number)[0].operators == first


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_replayed_step_skips_and_follows_the_rule_as_one_that_is_run(policy: Policy, way: str) -> None:
    replayed, eager = WAYS[way](policy), WAYS[way](policy)
    for number in range(WARM_UP):
        replayed.eager(number)
        eager.eager(number)
    graph, result = replayed.captured(WARM_UP)
    eager.eager(WARM_UP)
    for number in range(WARM_UP + 1, STEPS):
        replayed.load(number)
        graph.replay()
        expected = eager.eager(number)
        if number % 4 == 1:  # asked now and then: 5, 9, 21, 33 are bad
            assert result.skipped() == expected.skipped() == (number in OVERFLOWS | BAD_LOSSES)
            assert result.status() == expected.status()
            assert (result.scale, result.next_scale) == (expected.scale, expected.next_scale)
            if number in OVERFLOWS:
                assert result.scale > result.next_scale
            assert [each.name for each in result.culprits()] == [each.name for each in expected.culprits()]
            assert replayed.scaler.metrics()["skipped"] == eager.scaler.metrics()["skipped"]
    assert replayed.state == eager.state
    assert int(replayed.state.skipped) == len(OVERFLOWS | BAD_LOSSES)
    assert all(map(torch.equal, replayed.weights, eager.weights))


def test_the_rule_of_a_run_without_clipping_is_that_of_a_scaler_that_is_not_captured() -> None:
    ours, theirs = Run(Headroom()), Run(Headroom(), capturable=False)
    for number in range(STEPS):
        ours.eager(number)
        theirs.eager(number)
    assert ours.state == theirs.state
    assert all(map(torch.equal, ours.weights, theirs.weights))


def test_a_loaded_state_is_what_a_captured_step_goes_on_from() -> None:
    run = Run(Dynamic(init_scale=64.0, growth_interval=1000))
    for number in (1, 2, 3):
        run.eager(number)
    graph, result = run.captured(4)
    saved = run.scaler.state_dict()
    run.load(5)  # an overflow
    graph.replay()
    assert run.scaler.metrics()["scale"] == 32.0
    run.scaler.load_state_dict(saved)
    assert run.scaler.metrics()["scale"] == 64.0
    run.load(8)
    graph.replay()
    assert (float(result.scale), result.status()) == (64.0, Status.APPLIED)
    assert run.scaler.metrics()["applied"] == 5.0


def test_a_stuck_run_is_found_when_metrics_are_asked_for() -> None:
    run = Run(Headroom())
    run.scaler = LossScaler(run.model, Dynamic(init_scale=1.0, min_scale=1.0), capturable=True, max_consecutive_skips=4)
    for number in (1, 2, 3):
        run.eager(number)
    graph, _ = run.captured(5)
    for _ in range(4):
        graph.replay()
    with pytest.raises(ScaleStuck):
        run.scaler.metrics()


def test_a_scale_that_others_set_divides_and_stays_in_its_place() -> None:
    run = Run(Dynamic(init_scale=64.0), "drop-in")
    run.eager(1)
    place = run.scaler._rule.ahead
    run.load(2)
    run.scaler.scale(run.model(run.inputs).square().mean()).backward()
    run.scaler._scale.fill_(16.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.scaler._rule.ahead is place
    assert (run.scaler.get_scale(), int(run.state.applied)) == (16.0, 2)


def test_a_state_that_is_loaded_before_the_update_is_what_it_goes_on_from() -> None:
    run = Run(Dynamic(init_scale=64.0), "drop-in")
    run.eager(1)
    saved = run.scaler.state_dict()
    run.scaler.scale(run.model(run.inputs).square().mean()).backward()
    run.scaler.step(run.optimizer)
    run.scaler.load_state_dict(saved)
    run.scaler.update()
    assert (run.scaler.get_scale(), int(run.state.applied)) == (64.0, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_below_1_skips_nothing(way: str) -> None:
    run = WAYS[way](Dynamic(init_scale=0.5, min_scale=2.0**-10))
    for number in (1, 2, 3):
        run.eager(number)
    assert (int(run.state.applied), int(run.state.skipped)) == (3, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_inference_mode_may_come_first(way: str) -> None:
    run = WAYS[way](Headroom())
    run.eager(1)
    with torch.inference_mode():
        run.scaler.scale(run.model(run.inputs).square().mean())
    run.eager(2)
    assert int(run.state.applied) == 2


@pytest.mark.parametrize("policy", [Headroom(), Histogram(period=2)], ids=repr)
def test_a_step_in_the_backward_pass_keeps_its_state_in_one_place(policy: Policy) -> None:
    model = small_model()
    scaler = LossScaler(model, policy, capturable=True)
    scaler.step_in_backward(*[torch.optim.SGD([each], lr=0.1, fused=True) for each in model.parameters()])
    scaler.backward(loss_of(model))
    place = scaler._rule.ahead
    assert place is not None
    scaler.backward(loss_of(model))
    assert scaler._rule.ahead is place
    assert scaler.metrics()["applied"] == 2.0


def test_a_copy_begins_where_the_original_is() -> None:
    run = Run(Headroom())
    for number in (1, 2, 3):
        run.eager(number)
    other = copy.deepcopy(run.scaler)
    assert other._rule.state == run.scaler._rule.state
    assert other._rule.ahead is None


def test_what_cannot_be_captured_is_refused() -> None:
    run = Run(Headroom())
    run.optimizer = OPTIMIZERS["sgd foreach"](run.model.parameters())
    with pytest.raises(RuntimeError, match=r"needs a kernel .* Received: SGD that is not fused, with gradients of"):
        run.eager(1)


def test_another_policy_cannot_be_loaded_after_the_first_step() -> None:
    run, other = Run(Headroom()), Run(Dynamic())
    run.eager(1)
    other.eager(1)
    with pytest.raises(RuntimeError, match=r"the policy cannot be replaced .* Received: Dynamic"):
        run.scaler.load_state_dict(other.scaler.state_dict())


def test_a_second_update_is_refused() -> None:
    model, scaler = small_model(), GradScaler("sim", policy=Headroom(), capturable=True)
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.AdamW(half, fused=True) for half in halves]
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizers[0])
    scaler.update()
    scaler.step(optimizers[1])
    with pytest.raises(RuntimeError, match="each optimizer is checked once"):
        scaler.update()


def test_a_captured_run_is_not_recorded() -> None:
    with pytest.raises(ValueError, match=r"cannot be recorded.*Received: record='run\.jsonl'"):
        LossScaler(capturable=True, record="run.jsonl")


@pytest.mark.parametrize("way", ["LossScaler", "drop-in"])
def test_a_loss_that_was_scaled_before_the_capture_leaves_no_scale_in_it(way: str) -> None:
    replayed, eager = WAYS[way](POLICIES[1]), WAYS[way](POLICIES[1])
    for number in range(WARM_UP):
        replayed.eager(number)
        eager.eager(number)
    with torch.no_grad():
        replayed.scaler.scale(replayed.model(replayed.inputs).square().mean())  # as of a validation
    graph, _ = replayed.captured(WARM_UP)
    eager.eager(WARM_UP)
    for number in range(WARM_UP + 1, STEPS):
        replayed.load(number)
        graph.replay()
        eager.eager(number)
    assert replayed.state == eager.state
    assert all(map(torch.equal, replayed.weights, eager.weights))


def test_closures_and_half_weights_without_masters_are_refused() -> None:
    run = Run(Headroom())
    with pytest.raises(RuntimeError, match="A `closure` decides on the host"):
        run.scaler.closure(lambda: loss_of(run.model), run.optimizer)
    run.model.half()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), fused=True)
    run.scaler.backward(run.model(torch.ones(2, 4, dtype=torch.float16)).float().mean())
    with pytest.raises(RuntimeError, match=r"or FP16 with `MasterWeights`.* gradients of torch\.float16"):
        run.scaler.step(run.optimizer)


def test_a_step_that_is_repeated_after_its_optimizer_has_raised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Headroom(), "drop-in")
    run.scaler.scale(loss_of(run.model)).backward()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.optimizer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.scaler.step(run.optimizer)
    run.scaler.step(run.optimizer)
    with pytest.raises(RuntimeError, match="each optimizer is checked once"):
        run.scaler.update()
