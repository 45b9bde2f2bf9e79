"""Contracts of a step: it happens once, its gradients are used by nobody else, and nobody sees them scaled."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.torch.helpers import loss_of, same, small_model, weights
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradscale import Static
from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


class Interrupted(torch.optim.SGD):
    """Is interrupted once, after it has updated the weights."""

    interrupts = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt


def test_a_step_that_is_interrupted_is_not_made_again() -> None:
    model = small_model()
    optimizer, scaler = Interrupted(model.parameters(), lr=0.1), LossScaler(model, Static(8.0))
    scaler.backward(loss_of(model))
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    after = weights(model)
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        scaler.step(optimizer)
    assert same(weights(model), after)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_an_interrupt_while_gradients_are_measured_leaves_nothing_to_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(model, Static(8.0))
    scaler.backward(loss_of(model))
    with monkeypatch.context() as patched:
        patched.setattr("gradscale.torch.step.run.seen_here", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        scaler.step(optimizer)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_by_name() -> None:
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(model, Static(8.0))

    def stepped(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"has left none\. These parameters have hooks .*: 0\.weight, 0\.bias"):
        scaler.step(optimizer)


class Looking(torch.optim.AdamW):
    """Looks at the gradients before the fused kernel does."""

    seen: float

    def step(self, closure: Any = None) -> Any:
        self.seen = self.param_groups[0]["params"][0].grad.item()
        return super().step(closure)


def by_step(weight: nn.Parameter) -> tuple[torch.optim.Optimizer, list[float]]:
    optimizer, seen = Looking([weight], fused=True), list[float]()
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.seen))
    return optimizer, seen


def by_hook(weight: nn.Parameter) -> tuple[torch.optim.Optimizer, list[float]]:
    optimizer, seen = torch.optim.AdamW([weight], fused=True), list[float]()
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))  # type: ignore[union-attr]
    return optimizer, seen


@pytest.mark.parametrize("look", [by_step, by_hook])
@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
def test_whoever_looks_before_a_fused_kernel_sees_unscaled_gradients(look: Any, kind: Any) -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer, seen = look(weight)
    device = torch.get_default_device().type
    scaler: Any = LossScaler(policy=Static(8.0)) if kind is LossScaler else GradScaler(device, policy=Static(8.0))
    scaler.scale(weight * 0.5).backward()
    scaler.step(optimizer)
    if kind is GradScaler:
        scaler.update()
    assert set(seen) == {0.5}


def test_a_hook_for_all_optimizers_sees_unscaled_gradients() -> None:
    weight, seen = nn.Parameter(torch.ones(())), list[float]()
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(weight.grad.item()))  # type: ignore[union-attr, func-returns-value]
    try:
        scaler = LossScaler(policy=Static(8.0))
        scaler.backward(weight * 0.5)
        scaler.step(torch.optim.AdamW([weight], fused=True))
    finally:
        handle.remove()
    assert seen == [0.5]


@pytest.mark.not_simulated("compiled autograd")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch itself
@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
def test_compiled_autograd_gives_the_same_step(kind: Any) -> None:
    from torch._dynamo import compiled_autograd

    found = []
    for compiled in (False, True):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler: Any = LossScaler(model, Static(8.0)) if kind is LossScaler else GradScaler("cpu", policy=Static(8.0))
        for _ in range(2):
            with compiled_autograd._enable(torch.compile(backend="eager")) if compiled else nullcontext():
                scaler.backward(loss_of(model))
            scaler.step(optimizer)
            if kind is GradScaler:
                scaler.update()
            optimizer.zero_grad()
        found.append(weights(model))
    assert same(*found)
