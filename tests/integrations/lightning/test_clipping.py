"""`MixedPrecision` in a `Trainer`: clipping, in the step or by the user's own code."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from tests.integrations.lightning.runs import KINDS, L, Regression, fit, ours, scaler_in, theirs, weights_of

from gradscale import NoScaling
from gradscale.integrations.lightning import MixedPrecision
from gradscale.torch import GradScaler


class Clipped(Regression):
    """Keeps the norm of its gradients after each step, when it clears them."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.norms: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms += [float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads])))] if grads else []


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_after_the_step_are_unscaled_and_clipped(kind: str) -> None:
    module = Clipped(kind)
    fit(module, ours(), gradient_clip_val=0.125)
    assert module.norms == pytest.approx([0.125] * 3, rel=1e-4)


def calls_of(plugin: MixedPrecision, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of the scaler's method for each `unscale_` and each step that clips."""
    calls: list[str] = []
    scaler = scaler_in(plugin)
    unscale, step = scaler.unscale_, scaler.step
    monkeypatch.setattr(scaler, "unscale_", lambda optimizer: (calls.append("unscale_"), unscale(optimizer))[1])
    monkeypatch.setattr(
        scaler,
        "step",
        lambda optimizer, **kwargs: (calls.append(f"step {sorted(kwargs)}"), step(optimizer, **kwargs))[1],
    )
    return calls


@pytest.mark.parametrize(("algorithm", "keyword"), [("norm", "clip_norm"), ("value", "clip_value")])
@pytest.mark.parametrize("kind", KINDS)
def test_clip_is_part_of_the_step_where_nobody_looks(
    kind: str, algorithm: str, keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = ours()
    calls = calls_of(plugin, monkeypatch)
    fit(Regression(kind), plugin, batches=1, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    assert calls == [f"step ['{keyword}']"]


class Looks(L.Callback):
    """Keeps the largest gradient that it sees before the step."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.largest.append(max(float(grad.abs().max()) for grad in grads))


@pytest.mark.parametrize("kind", KINDS)
def test_callback_sees_unscaled_gradients_that_are_not_clipped_yet(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, plain, plugin = Looks(), Looks(), ours()
    fit(Regression(), None, batches=1, callbacks=[plain])
    calls = calls_of(plugin, monkeypatch)
    fit(Regression(kind), plugin, batches=1, callbacks=[callback], gradient_clip_val=2.0**-10)
    assert calls == ["unscale_", "step ['clip_norm']"]
    assert callback.largest == pytest.approx(plain.largest, rel=1e-2)


def test_lambda_callback_sees_unscaled_gradients() -> None:
    seen = Looks()
    callback = LambdaCallback(on_before_optimizer_step=seen.on_before_optimizer_step)
    fit(Regression("fused"), ours(), batches=1, callbacks=[callback])
    assert seen.largest[0] < 2.0**6


class OwnClip(Regression):
    """Clips in its own way, and looks at what came of it."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norm = float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads])))


@pytest.mark.parametrize("kind", KINDS)
def test_module_that_clips_itself_sees_clipped_gradients(kind: str) -> None:
    module = OwnClip(kind)
    fit(module, ours(), batches=1)
    assert module.norm == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_that_a_derived_class_replaces_is_called(kind: str) -> None:
    norms: list[float] = []

    class Recorded(MixedPrecision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
            parameters = list(self.main_params(optimizer))
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip_val)))

    module, expected = Clipped(kind), Clipped(kind)
    fit(module, Recorded(scaler=GradScaler("cpu", init_scale=2.0**10)), gradient_clip_val=0.125)
    fit(expected, ours(), gradient_clip_val=0.125)
    assert len(norms) == 4
    assert max(norms) < 2.0**6, "unscaled"
    assert weights_of(module) == pytest.approx(weights_of(expected), rel=1e-4)


@pytest.mark.parametrize("clip", [None, 0, 1.0])
@pytest.mark.parametrize("method", ["_after_closure", "_clip_gradients", "clip_gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_derived_class_that_clips_gets_unscaled_gradients_as_from_lightnings_plugin(
    kind: str, method: str, clip: float | None
) -> None:
    def clips(self: Any, *args: Any, **_: Any) -> None:
        [optimizer] = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        torch.nn.utils.clip_grad_value_(self.main_params(optimizer), 2.0**-10)

    def derived(plugin: Any) -> Any:
        plugin.__class__ = type("Derived", (type(plugin),), {method: clips})
        return plugin

    module, lightnings = Regression(kind), Regression("foreach")  # of a fused one, Lightning's does not unscale them
    fit(module, derived(ours()), gradient_clip_val=clip)
    fit(lightnings, derived(theirs()), gradient_clip_val=clip)
    assert weights_of(module) == pytest.approx(weights_of(lightnings), rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0, 1.0])
def test_clip_gradients_of_a_module_gets_unscaled_gradients_as_from_lightnings_plugin(clip: float | None) -> None:
    class Clips(Regression):
        def clip_gradients(self, optimizer: Any, *_: Any, **__: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            torch.nn.utils.clip_grad_value_(self.parameters(), 2.0**-10)

    module, lightnings = Clips(), Clips()
    fit(module, ours(), gradient_clip_val=clip)
    fit(lightnings, theirs(), gradient_clip_val=clip)
    assert weights_of(module) == weights_of(lightnings)


def test_function_that_stands_in_for_torchs_clipping_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = torch.nn.utils.clip_grad_norm_, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(float(norm := own(*args, **kwargs)))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    fit(Regression("fused"), ours(), gradient_clip_val=0.125)
    assert len(calls) == 4


def test_policy_without_a_scale_still_clips() -> None:
    module, plain = Clipped("foreach"), Clipped("foreach")
    fit(module, MixedPrecision(NoScaling()), gradient_clip_val=0.125)
    fit(plain, None, gradient_clip_val=0.125)
    assert module.norms == pytest.approx(plain.norms, rel=1e-3)
