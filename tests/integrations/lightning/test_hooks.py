"""`MixedPrecision` in a `Trainer`: the hooks around the backward pass and before the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler
from tests.integrations.lightning.runs import L, Regression, fit, ours, theirs
from torch import Tensor

from gradscale import NoScaling
from gradscale.integrations.lightning import MixedPrecision


def test_hooks_before_the_backward_pass_see_the_loss_itself() -> None:
    class Hook(Regression):
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen = loss.item()

    module = Hook()
    fit(module, ours(), batches=1)
    assert module.seen == module.losses[0]


HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


class Plain(L.LightningModule):
    """A module without hooks, and the names of those of others that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.called = torch.nn.Linear(8, 1), []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def noting(self, hook: str) -> Callable[..., None]:
        return lambda *_: self.called.append(hook)


def on_its_class(module: Plain) -> list[Callback]:
    methods = {hook: lambda self, *_, hook=hook: self.called.append(hook) for hook in HOOKS}
    module.__class__ = type("Hooked", (Plain,), methods)
    return []


def on_the_module(module: Plain) -> list[Callback]:
    for hook in HOOKS:
        setattr(module, hook, module.noting(hook))
    return []


def on_a_callback(module: Plain) -> list[Callback]:
    methods = {hook: lambda self, *_, hook=hook: module.called.append(hook) for hook in HOOKS}
    return [type("Hooked", (Callback,), methods)(), Callback()]


def on_a_lambda_callback(module: Plain) -> list[Callback]:
    return [Callback(), LambdaCallback(**{hook: module.noting(hook) for hook in HOOKS})]


def added_during_the_run(module: Plain) -> list[Callback]:
    def add(trainer: Any, *_: Any) -> None:
        if len(trainer.callbacks) == 1:
            trainer.callbacks += on_a_callback(module)

    return [LambdaCallback(on_train_batch_end=add)]


@pytest.mark.parametrize("owner", [L.LightningModule, Callback])
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_that_is_set_on_lightnings_own_class_is_called(
    hook: str, owner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(owner, hook, lambda self, *_: called.append(hook))
    fit(Plain(), ours(), batches=3, callbacks=[Callback()])
    assert called == [hook] * 3


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    "hooked", [on_its_class, on_the_module, on_a_callback, on_a_lambda_callback, added_during_the_run]
)
def test_hooks_are_called_as_with_lightnings_plugin(
    hooked: Callable[[Plain], list[Callback]], clip: float | None
) -> None:
    called = []
    for plugin in (ours(), theirs()):
        module = Plain()
        fit(module, plugin, batches=3, callbacks=hooked(module), gradient_clip_val=clip)
        called.append(module.called)
    assert called[0] == called[1]
    assert set(called[0]) == set(HOOKS)


def test_profiler_times_hooks_that_nobody_has_as_with_lightnings_plugin() -> None:
    timed = []
    for plugin in (ours(), theirs()):
        profiler = SimpleProfiler()
        fit(Plain(), plugin, callbacks=[Callback()], profiler=profiler)
        timed.append({name.replace(type(plugin).__module__, "") for name in profiler.recorded_durations})
    assert timed[0] == timed[1]
    assert any("on_before_optimizer_step" in name for name in timed[0])


def test_hook_before_the_step_is_called_without_scaling_too() -> None:
    seen: list[float] = []

    class Seen(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append(float(torch.linalg.vector_norm(next(module.parameters()).grad)))

    for plugin in (MixedPrecision(NoScaling()), ours()):
        fit(Regression("fused"), plugin, batches=1, callbacks=[Seen()])
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)
