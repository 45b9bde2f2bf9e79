"""`backward(loss, retries=n)`: the backward pass alone is run again at a lower scale, and nothing else is lost."""

import copy
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN, loss_of, same, small_model, weights
from tests.torch.process_group import end_process_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale import Dynamic, Policy, Static
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


class OverflowAbove(torch.autograd.Function):
    """Passes values through; its gradient is inf once it is larger than `limit`, as in FP16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return torch.where(grad.abs() > ctx.limit, torch.inf, grad), None


def narrow(loss: Tensor, limit: float = 1024.0) -> Tensor:
    """Returns a loss whose backward pass overflows where the scale is above `limit`."""
    return OverflowAbove.apply(loss, limit)  # type: ignore[return-value]


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def setup(policy: Policy | None = None) -> tuple[nn.Sequential, torch.optim.Optimizer, LossScaler]:
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(model, policy or Dynamic(init_scale=65536.0))


def test_a_backward_pass_that_overflows_is_run_again_until_it_does_not() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(narrow(loss_of(model)), retries=10)
    result = scaler.step(optimizer)
    assert not result.skipped()
    assert result.retries == 6
    assert (result.scale.item(), result.next_scale.item()) == (1024.0, 1024.0)
    assert scaler.metrics()["skipped"] == 0


def test_the_update_after_a_retry_is_the_one_that_a_lower_scale_makes() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(narrow(loss_of(model)), retries=10)
    scaler.step(optimizer, clip_norm=0.1)
    expected, its_optimizer, low = setup(Static(1024.0))
    low.backward(loss_of(expected))
    low.step(its_optimizer, clip_norm=0.1)
    assert same(weights(model), weights(expected))


def test_a_pass_that_does_not_overflow_is_run_once() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model), retries=3)
    assert scaler.step(optimizer).retries == 0


def test_a_pass_after_another_one_of_the_step_is_not_run_again() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model, 0))
    scaler.backward(narrow(loss_of(model, 1)), retries=10)
    result = scaler.step(optimizer)
    assert (result.retries, result.scale.item(), str(result.status())) == (0, 65536.0, "overflow")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_after_one_that_was_run_again_have_its_scale(set_to_none: bool) -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    scaler.backward(narrow(loss_of(model, 0)), retries=10)
    scaler.backward(loss_of(model, 1), retries=10)
    assert scaler.step(optimizer).retries == 6
    expected, its_optimizer, low = setup(Static(1024.0))
    low.backward(loss_of(expected))
    low.step(its_optimizer)
    its_optimizer.zero_grad()
    low.backward(loss_of(expected, 0))
    low.backward(loss_of(expected, 1))
    low.step(its_optimizer)
    assert same(weights(model), weights(expected))


def test_a_nan_in_a_parameter_that_no_optimizer_has_is_not_tried_again() -> None:
    model, stray = small_model(), nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler([model, stray], Dynamic())
    for _ in range(2):
        scaler.backward(loss_of(model))
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.backward(loss_of(model) + narrow(stray(torch.ones(1, 1)).sum(), limit=-1.0), retries=5)
    result = scaler.step(optimizer)
    assert (result.retries, str(result.status()), result.scale.item()) == (0, "applied", 65536.0)


def test_a_loss_scaled_before_the_retry_is_brought_to_the_new_scale() -> None:
    model, optimizer, scaler = setup()
    early = scaler.scale(loss_of(model, 1))
    scaler.backward(narrow(loss_of(model, 0)), retries=10)
    early.backward()
    scaler.step(optimizer)
    expected, its_optimizer, low = setup(Static(1024.0))
    low.backward(loss_of(expected, 0))
    low.backward(loss_of(expected, 1))
    low.step(its_optimizer)
    assert same(weights(model), weights(expected))


def test_a_retry_backs_off_whatever_the_hysteresis_says_and_spends_no_credit() -> None:
    model, optimizer, scaler = setup(Dynamic(init_scale=2048.0, hysteresis=3))
    scaler.backward(narrow(loss_of(model)), retries=1)
    result = scaler.step(optimizer)
    assert not result.skipped()
    assert result.scale.item() == 1024.0
    assert scaler._rule.state.credits == 3


@pytest.mark.parametrize(
    ("policy", "scale_after"),
    [(Static(65536.0), 65536.0), (Dynamic(init_scale=65536.0, min_scale=65536.0), 65536.0)],
    ids=["Static", "at the floor"],
)
def test_there_is_no_retry_where_the_scale_cannot_go_lower(policy: Policy, scale_after: float) -> None:
    model, optimizer, scaler = setup(policy)
    scaler.backward(narrow(loss_of(model)), retries=5)
    result = scaler.step(optimizer)
    assert result.skipped()
    assert result.retries == 0
    assert result.next_scale.item() == scale_after


@pytest.mark.parametrize("bad", [INF, NAN])
def test_there_is_no_retry_for_a_loss_that_is_not_finite(bad: float) -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model) * bad, retries=5)
    result = scaler.step(optimizer)
    assert result.status() == "nonfinite_loss"
    assert result.retries == 0
    assert result.next_scale.item() == 65536.0


def test_gradients_that_overflow_at_every_scale_back_off_once_from_the_first() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(narrow(loss_of(model), limit=-1.0), retries=3)
    assert scaler.loss_scale.item() == 8192.0
    result = scaler.step(optimizer)
    assert result.status() == "overflow"
    assert result.retries == 3
    assert (result.scale.item(), result.next_scale.item()) == (8192.0, 32768.0)
    assert scaler.metrics()["skipped"] == 1


def test_gradients_that_a_hopeless_retry_left_finite_keep_the_scale_they_were_made_with() -> None:
    bad, good = nn.Linear(1, 1), nn.Linear(1, 1)
    scaler = LossScaler([bad, good], Dynamic(init_scale=65536.0))
    loss = narrow(bad(torch.ones(1, 1)).sum(), limit=-1.0) + good(torch.ones(1, 1)).sum()
    scaler.backward(loss, retries=3)
    result = scaler.step(torch.optim.SGD(good.parameters(), lr=1.0))
    assert not result.skipped()
    assert good.weight.grad is not None
    assert good.weight.grad.item() == 1.0


def test_headroom_learns_from_a_retry() -> None:
    model, optimizer, scaler = setup(Headroom(init_scale=2.0**40))
    for step in range(4):
        scaler.backward(narrow(loss_of(model, step)), retries=10)
        assert not scaler.step(optimizer).skipped()
        optimizer.zero_grad()
    assert scaler.loss_scale.item() <= 1024.0


class Explodes(torch.autograd.Function):
    """Raises in its second backward pass; its gradient is inf in the first."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Explodes.passes += 1
        if Explodes.passes == 2:
            raise ZeroDivisionError("in backward")
        return grads[0] * torch.inf


def test_a_backward_pass_that_raises_leaves_everything_as_it_was() -> None:
    model, optimizer, scaler = setup()
    saved = scaler.state_dict()
    Explodes.passes = 0
    with pytest.raises(ZeroDivisionError, match="in backward"):
        scaler.backward(Explodes.apply(loss_of(model, 1)), retries=5)  # type: ignore[arg-type]
    assert Explodes.passes == 2
    assert grads(model) == []
    assert scaler.state_dict() == saved
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).retries == 0


def test_gradients_left_over_are_refused_after_a_retry_too() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model), retries=1)
    scaler.step(optimizer)
    scaler.backward(narrow(loss_of(model)), retries=10)
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        scaler.step(optimizer)


def test_a_parameter_outside_of_the_model_has_the_gradient_of_the_last_attempt_alone() -> None:
    model, outside = small_model(), nn.Parameter(torch.zeros(()))
    scaler = LossScaler(model, Dynamic(init_scale=65536.0))
    scaler.backward(narrow(loss_of(model)) + outside, retries=10)
    assert not scaler.step(torch.optim.SGD([outside], lr=1.0)).skipped()
    assert outside.item() == -1.0


@pytest.mark.not_simulated("sparse tensors")
def test_sparse_gradients_are_those_of_the_last_attempt() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    scaler = LossScaler(embedding, Dynamic(init_scale=65536.0))
    scaler.backward(narrow(embedding(torch.tensor([1, 1, 3])).sum()), retries=10)
    scaler.step(torch.optim.SGD(embedding.parameters(), lr=1.0))
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_a_leaf_input_gets_the_gradient_of_the_last_attempt_alone() -> None:
    model, optimizer, scaler = setup()
    x = torch.ones(2, 4, requires_grad=True)
    scaler.backward(narrow(model(x).sum()), retries=10)
    assert x.grad is not None
    found = x.grad / scaler.loss_scale
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert scaler.step(optimizer).retries == 6
    assert torch.equal(found, expected)


def test_post_accumulate_hooks_are_called_once_with_the_gradients_of_the_last_attempt() -> None:
    model, _, scaler = setup()
    seen: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    handle = next(model.parameters()).register_post_accumulate_grad_hook(hook)
    scaler.backward(narrow(loss_of(model, 1)), retries=10)
    assert same(seen, grads(model)[:1])
    scaler.backward(narrow(loss_of(model, 1), limit=INF))
    assert len(seen) == 2
    handle.remove()
    scaler.backward(narrow(loss_of(model, 1), limit=INF), retries=1)
    assert len(seen) == 2


def test_post_accumulate_hooks_are_kept_if_the_backward_pass_raises() -> None:
    model, _, scaler = setup()
    seen: list[Tensor] = []
    next(model.parameters()).register_post_accumulate_grad_hook(seen.append)
    Explodes.passes = 0
    with pytest.raises(ZeroDivisionError):
        scaler.backward(Explodes.apply(loss_of(model)), retries=5)  # type: ignore[arg-type]
    assert seen == []
    scaler.backward(loss_of(model))
    assert len(seen) == 1


def test_an_interrupt_after_the_last_attempt_leaves_hooks_and_gradients_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, scaler = setup()
    seen: list[Tensor] = []
    next(model.parameters()).register_post_accumulate_grad_hook(seen.append)
    saved = scaler.state_dict()
    with monkeypatch.context() as patched:
        patched.setattr("gradscale.torch.window.retry.free", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.backward(narrow(loss_of(model)), retries=10)
    assert grads(model) == seen == []
    assert scaler.state_dict() == saved
    scaler.backward(narrow(loss_of(model)), retries=10)
    assert len(seen) == 1
    assert scaler.step(optimizer).retries == 6


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_the_copy_of_a_scaler_alone_runs_the_backward_pass_again_too(copied: Any) -> None:
    model, optimizer, scaler = setup()
    twin = copied(scaler)
    twin.backward(narrow(loss_of(model)), retries=10)
    result = twin.step(optimizer)
    assert not result.skipped()
    assert result.retries == 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_can_be_retried(reentrant: bool) -> None:
    model, optimizer, scaler = setup()
    x = torch.randn(8, 4, requires_grad=True)
    scaler.backward(narrow(checkpoint(model, x, use_reentrant=reentrant).sum()), retries=10)  # type: ignore[union-attr]
    assert not scaler.step(optimizer).skipped()
    expected, its_optimizer, low = setup(Static(1024.0))
    low.backward(expected(x).sum())
    low.step(its_optimizer)
    assert same(weights(model), weights(expected))


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
@pytest.mark.parametrize(("limit", "retries"), [(INF, 0), (1024.0, 6)], ids=["clean", "run again"])
def test_the_graph_is_freed_after_the_last_attempt(limit: float, retries: int) -> None:
    model, optimizer, scaler = setup()
    inside: list[weakref.ref[Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        inside.append(weakref.ref(output))

    model[1].register_forward_hook(keep)
    out = model(torch.randn(8, 4))
    loss = narrow(out.square().sum(), limit)
    scaler.backward(loss, retries=10)
    assert scaler.step(optimizer).retries == retries
    assert inside[0]() is None
    assert out.grad_fn is not None
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_a_graph_that_is_to_be_kept_is_kept() -> None:
    model, _, scaler = setup(Static(4.0))
    kept = loss_of(model)
    scaler.backward(kept, retries=1, retain_graph=True)
    scaler.backward(kept)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"retries": -1}, ValueError, r"`retries` must not be negative\. Received: retries=-1\."),
        ({"retries": 1.0}, TypeError, r"`retries` must be an integer\. Received: retries=1\.0 \(float\)\."),
        ({"retries": True}, TypeError, r"`retries` must be an integer\. Received: retries=True \(bool\)\."),
        ({"retries": None}, TypeError, r"`retries` must be an integer\. Received: retries=None \(NoneType\)\."),
        ({"retries": 1, "create_graph": True}, ValueError, r"`create_graph=True` cannot differentiate"),
    ],
)
def test_retries_that_cannot_be_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    model, _, scaler = setup()
    with pytest.raises(error, match=text):
        scaler.backward(loss_of(model), **arguments)


def test_retries_need_the_model() -> None:
    with pytest.raises(RuntimeError, match=r"must know every parameter.*Build the scaler as `LossScaler\(model\)`"):
        LossScaler(policy=Dynamic()).backward(loss_of(small_model()), retries=1)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapped_in", [lambda ddp: ddp, nn.Sequential], ids=["itself", "a module"])
def test_a_data_parallel_model_is_refused_unless_it_does_not_synchronise(wrapped_in: Any) -> None:
    model = small_model()
    parallel = nn.parallel.DistributedDataParallel(model)
    scaler = LossScaler(wrapped_in(parallel), Dynamic(init_scale=65536.0))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match=r"of DistributedDataParallel again: it sends its gradients"):
        scaler.backward(narrow(loss_of(parallel)), retries=10)
    scaler.backward(loss_of(parallel))
    scaler.step(optimizer)
    optimizer.zero_grad()
    with parallel.no_sync():
        scaler.backward(narrow(loss_of(parallel)), retries=10)
    assert not scaler.step(optimizer).skipped()
