"""`MixedPrecision` in a `Trainer`: the hooks around the backward pass and before the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from tests.integrations.lightning.runs import Regression, fit, ours, theirs
from torch import Tensor

from gradscale import NoScaling
from gradscale.integrations.lightning import MixedPrecision

HOOK = "on_before_optimizer_step"


def test_hooks_before_the_backward_pass_see_the_loss_itself() -> None:
    class Hook(Regression):
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen = loss.item()

    module = Hook()
    fit(module, ours(), batches=1)
    assert module.seen == module.losses[0]


def on_its_class(module: Regression, hook: Callable[..., None]) -> list[Callback]:
    module.__class__ = type("Hooked", (Regression,), {HOOK: lambda self, optimizer: hook(None, self)})
    return []


def on_the_module(module: Regression, hook: Callable[..., None]) -> list[Callback]:
    setattr(module, HOOK, lambda optimizer: hook(None, module))
    return []


def on_a_callback(module: Regression, hook: Callable[..., None]) -> list[Callback]:
    return [type("Hooked", (Callback,), {HOOK: lambda self, *given: hook(*given)})(), Callback()]


def on_a_lambda_callback(module: Regression, hook: Callable[..., None]) -> list[Callback]:
    return [Callback(), LambdaCallback(on_before_optimizer_step=hook)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("hooked", [on_its_class, on_the_module, on_a_callback, on_a_lambda_callback])
def test_hook_before_the_step_sees_unscaled_gradients(
    hooked: Callable[..., list[Callback]], clip: float | None
) -> None:
    seen: list[float] = []

    def hook(trainer: Any, module: Any, *_: Any) -> None:
        seen.append(float(torch.linalg.vector_norm(next(module.parameters()).grad)))

    for plugin in (ours(), theirs()):
        module = Regression()
        fit(module, plugin, batches=1, callbacks=hooked(module, hook), gradient_clip_val=clip)
    assert len(seen) == 2
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)


def test_hook_before_the_step_is_called_without_scaling_too() -> None:
    seen: list[float] = []

    class Seen(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append(float(torch.linalg.vector_norm(next(module.parameters()).grad)))

    for plugin in (MixedPrecision(NoScaling()), ours()):
        fit(Regression("fused"), plugin, batches=1, callbacks=[Seen()])
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)
