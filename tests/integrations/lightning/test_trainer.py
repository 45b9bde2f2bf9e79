"""`MixedPrecision` in `lightning.Trainer`: real training runs in FP16 on the CPU."""

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from tests.integrations.lightning.runs import (
    KINDS,
    L,
    Regression,
    data,
    fit,
    ours,
    scaler_in,
    theirs,
    trainer_of,
    weights_of,
)
from tests.torch.short_runs import fine_tuned_model, large_loss
from torch import Tensor

from gradscale import CheckOnly, Static
from gradscale.integrations.lightning import MixedPrecision
from gradscale.recording.form import read_line
from gradscale.torch import GradScaler


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 1.0}])
@pytest.mark.parametrize("kind", KINDS)
def test_training_in_fp16_learns_and_a_skipped_step_is_reported(kind: str, clip: dict[str, Any]) -> None:
    module, plugin = Regression(kind, bad=(5,)), MixedPrecision("auto")
    trainer = fit(module, plugin, max_epochs=8, **clip)
    assert module.types == {torch.float16}
    assert module.losses[-1] < 0.5 * module.losses[0]
    assert trainer.callback_metrics["gradscale/skipped"] == 1
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_forward_pass_runs_in_the_context_of_lightnings_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which turns the cache of autocast off in 2.6, and on again in later releases.
    entered, context = [], LightningMixedPrecision.forward_context

    def noted(plugin: LightningMixedPrecision) -> Any:
        entered.append(plugin)
        return context(plugin)

    monkeypatch.setattr(LightningMixedPrecision, "forward_context", noted)
    module, plugin = Regression(), ours()
    fit(module, plugin)
    assert set(entered) == {plugin}
    assert module.types == {torch.float16}


class FineTuned(L.LightningModule):
    """Its first gradients overflow at torch's first scale."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = fine_tuned_model(), kind

    def training_step(self, batch: Any, index: int) -> Tensor:
        return large_loss(self.net, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        how: dict[str, Any] = {self.kind: True}
        return torch.optim.AdamW(self.parameters(), lr=1e-4, **how)


@pytest.mark.parametrize("steps", [3, 10, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_short_run_loses_no_step(kind: str, steps: int) -> None:
    trainer = fit(FineTuned(kind), MixedPrecision("auto"), batches=steps)
    assert trainer.callback_metrics["gradscale/skipped"] == 0
    assert trainer.callback_metrics["gradscale/applied"] == steps


@pytest.mark.parametrize(("retries", "skipped"), [(0, 3), (20, 0)])
def test_retries_can_be_asked_for(retries: int, skipped: int) -> None:
    trainer = fit(FineTuned("fused"), MixedPrecision("torch", retries=retries), batches=3)
    assert trainer.callback_metrics["gradscale/skipped"] == skipped


def test_retries_are_refused_where_the_module_runs_its_own_backward_pass() -> None:
    class OwnBackward(FineTuned):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

    with pytest.raises(MisconfigurationException, match="Received: retries=2 and a module with its own `backward`"):
        fit(OwnBackward("fused"), MixedPrecision(retries=2), batches=1)
    fit(OwnBackward("fused"), MixedPrecision(retries=0), batches=1)


def test_schedule_can_advance_on_a_skip() -> None:
    module = Regression(bad=(1,), interval="step")
    fit(module, ours(on_skip="advance"))
    assert module.rates == [2.0**-6, 2.0**-7, 2.0**-8, 2.0**-9]


def test_schedule_of_epochs_advances_whatever_was_skipped() -> None:
    module = Regression(bad=(3, 7), interval="epoch")
    fit(module, ours(), max_epochs=2)
    assert module.rates[3:] == [2.0**-6] * 4 + [2.0**-7]


def test_schedule_of_several_steps_advances_with_batches() -> None:
    module = Regression(bad=(1,), interval="step")
    module.frequency = 2
    fit(module, ours())
    assert module.rates == [2.0**-5, 2.0**-6, 2.0**-6, 2.0**-7]


def test_module_has_its_own_methods_again_after_the_run() -> None:
    module = Regression(interval="step")
    fit(module, ours())
    assert "lr_scheduler_step" not in vars(module)
    fit(module, ours())
    assert len(module.rates) == 8


def test_method_that_was_set_on_the_module_is_there_again_after_the_run() -> None:
    module = Regression(bad=(1,), interval="step")
    calls: list[Any] = []

    def advance(scheduler: Any, metric: Any) -> None:
        calls.append(scheduler)
        scheduler.step()

    module.lr_scheduler_step = advance
    fit(module, ours())
    assert len(calls) == 3
    assert module.lr_scheduler_step is advance


class OwnHook(Regression):
    """Counts how often its own `lr_scheduler_step` is called."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad=bad, interval="step")
        self.calls = 0

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls += 1
        scheduler.step()


def test_schedules_own_hook_is_called_unless_it_is_held() -> None:
    module = OwnHook(bad=(1,))
    fit(module, ours())
    assert module.calls == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_that_a_callback_makes_of_the_module_has_its_own_hook(copied: Callable[[Any], Any]) -> None:
    copies: list[OwnHook] = []
    module = OwnHook()
    fit(module, ours(), callbacks=[LambdaCallback(on_train_batch_end=lambda *args: copies.append(copied(args[1])))])
    fit(copies[0], ours())
    assert (module.calls, copies[0].calls) == (4, 5)


def test_loggers_and_progress_bar_get_the_metrics(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    trainer = fit(Regression(bad=(1,)), ours(), logger=logger, log_every_n_steps=1, gradient_clip_val=1.0)
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    skipped = rows[0].split(",").index("gradscale/skipped")
    assert [float(row.split(",")[skipped]) for row in rows[1:]] == [0, 1, 1, 1]
    assert {"gradscale/scale", "gradscale/skip_rate", "gradscale/grad_norm"} <= set(rows[0].split(","))
    assert trainer.progress_bar_metrics == {"gradscale/scale": 2.0**9, "gradscale/skipped": 1.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["auto", "torch:init_scale=1024.0"])
def test_loggers_get_the_norm_of_unscaled_gradients_without_clipping(kind: str, policy: str) -> None:
    clips: list[dict[str, Any]] = [{"gradient_clip_val": 1e9}, {}]
    clipped, module = (fit(Regression(kind), MixedPrecision(policy), **clip) for clip in clips)
    norm = clipped.callback_metrics["gradscale/grad_norm"]
    assert 0 < norm < 100
    assert module.callback_metrics["gradscale/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_norm_of_a_skipped_step_is_not_logged_without_clipping() -> None:
    assert "gradscale/grad_norm" not in fit(Regression(bad=(0,)), ours(), batches=1).callback_metrics


def test_skip_is_shown_at_once_and_counts_by_the_end_of_an_epoch() -> None:
    class Watched(Regression):
        def __init__(self) -> None:
            super().__init__(bad=(2,))
            self.skipped: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.skipped.append(float(self.trainer.callback_metrics.get("gradscale/skipped", -1)))

    module = Watched()
    trainer = fit(module, ours(), batches=5)
    assert module.skipped == [-1, -1, 1, 1, 1], "nothing is logged at other steps: loggers write every 50 of them"
    assert trainer.callback_metrics["gradscale/applied"] == 4


def test_nothing_is_logged_if_not_wanted() -> None:
    assert not fit(Regression(bad=(1,)), ours(log=False)).callback_metrics


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_batches_are_one_step(kind: str) -> None:
    module, plugin = Regression(kind, bad=(1,), interval="step"), ours()
    fit(module, plugin, accumulate_grad_batches=2, gradient_clip_val=1.0)
    assert scaler_in(plugin).metrics()["skipped"] == 1
    assert scaler_in(plugin).metrics()["applied"] == 1
    assert module.rates == [2.0**-5, 2.0**-5, 2.0**-5, 2.0**-6]


def test_batch_without_a_loss_makes_no_step() -> None:
    class Picky(Regression):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            return None if index == 1 else super().training_step(batch, index)

    plugin = ours()
    fit(Picky(interval="step"), plugin, gradient_clip_val=1.0)
    assert scaler_in(plugin).metrics()["applied"] == 3


@pytest.mark.parametrize("own_hook", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_batch_without_a_loss_leaves_the_clip_as_in_lightnings_plugin(
    missing: int, accumulated: int, own_hook: bool
) -> None:
    class Picky(Regression):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            return None if index == missing else super().training_step(batch, index)

    class Hooked(Picky):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(*args, **kwargs)

    module, expected = (Hooked if own_hook else Picky)(), Picky()
    for each, plugin in ((module, ours()), (expected, theirs())):
        # Some norms are below the bound, and some above.
        fit(each, plugin, batches=6, gradient_clip_val=4.0, accumulate_grad_batches=accumulated)
    assert weights_of(module) == pytest.approx(weights_of(expected), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_run_after_one_that_was_interrupted_starts_with_scaled_gradients(kind: str) -> None:
    interrupts = True

    class Interrupted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(self.parameters(), lr=2.0**-6, fused=kind == "fused")

        def configure_optimizers(self) -> Any:
            return self.optimizer  # the same in both runs

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if interrupts:
                raise OSError("as from a logger")

    plugin, module, expected = ours(), Interrupted(), Interrupted()
    with pytest.raises(OSError, match="as from a logger"):
        fit(module, plugin)
    interrupts = False
    fit(module, plugin)
    fit(expected, ours())
    assert weights_of(module) == weights_of(expected)


def test_modules_own_backward_gets_the_scaled_loss() -> None:
    class OwnBackward(Regression):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.given = loss.item()
            super().backward(loss, *args, **kwargs)

    module = OwnBackward()
    fit(module, ours(), batches=1)
    assert module.given == pytest.approx(2.0**10 * module.losses[0])


def test_bf16_needs_no_scaler() -> None:
    module = Regression("fused")
    trainer = fit(module, MixedPrecision(precision="bf16-mixed"), gradient_clip_val=1.0)
    assert module.types == {torch.bfloat16}
    assert not trainer.callback_metrics


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_arguments_of_lightnings_own_class_mean_the_same(precision: Any) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision

    module, lightnings = Regression(), Regression()
    plugin = MixedPrecision(precision, "cpu")
    fit(module, plugin)
    fit(lightnings, LightningMixedPrecision(precision, "cpu"))
    assert (plugin.precision, plugin.device) == (precision, "cpu")
    assert module.types == lightnings.types
    assert MixedPrecision("16-mixed", "cpu", scaler := GradScaler("cpu")).scaler is scaler


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_with_check_only_does_not_let_one_inf_end_the_run(kind: str) -> None:
    plain, module = Regression(kind, bad=(1,)), Regression(kind, bad=(1,), interval="step")
    fit(plain, MixedPrecision("bf16-mixed"))
    assert not all(map(torch.isfinite, map(torch.sum, plain.parameters()))), "BF16 without a check"
    plugin = MixedPrecision(CheckOnly(), precision="bf16-mixed")
    trainer = fit(module, plugin)
    assert module.types == {torch.bfloat16}
    assert all(map(torch.isfinite, map(torch.sum, module.parameters())))
    assert trainer.callback_metrics["gradscale/skipped"] == 1
    assert module.rates == [2.0**-6, 2.0**-6, 2.0**-7, 2.0**-8]


def test_bf16_with_check_only_trains_as_without_where_all_is_finite() -> None:
    module, plain = Regression(), Regression()
    fit(module, MixedPrecision("check_only", precision="bf16-mixed"), gradient_clip_val=0.125)
    fit(plain, MixedPrecision("bf16-mixed"), gradient_clip_val=0.125)
    assert weights_of(module) == pytest.approx(weights_of(plain), rel=1e-5)


def test_scaler_of_another_class_is_used_as_by_lightnings_plugin_and_is_warned_of() -> None:
    module, lightnings = Regression(bad=(1,), interval="step"), Regression(bad=(1,), interval="step")
    with pytest.warns(UserWarning, match=r"torch\.amp\.grad_scaler\.GradScaler.*pass a `gradscale\.torch\.GradScaler`"):
        plugin = MixedPrecision(scaler=torch.amp.GradScaler("cpu", 2.0**10, growth_interval=4))
    trainer = fit(module, plugin, gradient_clip_val=0.125)
    fit(lightnings, theirs(), gradient_clip_val=0.125)
    assert weights_of(module) == weights_of(lightnings)
    assert module.rates == lightnings.rates
    assert not trainer.callback_metrics
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Regression("fused"), plugin, gradient_clip_val=0.125)


def test_results_are_not_kept_in_manual_optimization() -> None:
    """There the user advances schedules, and nothing would take the results out again."""

    class ByHand(Regression):
        def __init__(self) -> None:
            super().__init__(interval="step")
            self.automatic_optimization = False

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).float().square().mean())
            optimizer.step()
            kept.append(weakref.ref(scaler_in(plugin).last.applied))  # type: ignore[union-attr]

    kept: list[weakref.ref[Any]] = []
    plugin = ours()
    fit(ByHand(), plugin, batches=8)
    assert [each() for each in kept[:-1]] == [None] * 7


def test_validation_runs_in_fp16_too() -> None:
    class Validated(Regression):
        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.types.add(self.net(batch[0]).dtype)

    module, plugin = Validated(), MixedPrecision()
    trainer_of(plugin).validate(module, data(), verbose=False)
    assert module.types == {torch.float16}


def test_device_is_that_of_the_strategy() -> None:
    plugin = MixedPrecision()
    fit(Regression(), plugin, batches=1)
    assert plugin.device == "cpu"
    assert MixedPrecision(device="meta").device == "meta"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: MixedPrecision(Static(8), scaler=GradScaler("cpu")), ValueError, "exclude each other"),
        (lambda: MixedPrecision(on_skip="wait"), ValueError, '`on_skip` must be "hold" or "advance"'),  # type: ignore[arg-type]
        (lambda: MixedPrecision(retries=-1), ValueError, "`retries` must not be negative"),
        (lambda: MixedPrecision("no such policy"), ValueError, "no such policy"),
        (lambda: MixedPrecision(None), TypeError, "`policy` must be a policy"),  # type: ignore[arg-type]
        (lambda: MixedPrecision("16-mixed", precision="bf16-mixed"), ValueError, "The precision is given twice"),
        (lambda: MixedPrecision("32-true"), ValueError, r"Passed `MixedPrecision\(precision='32-true'\)`"),
        (lambda: MixedPrecision(16), ValueError, r"Passed `MixedPrecision\(precision=16\)`"),  # type: ignore[arg-type]
        (
            lambda: MixedPrecision("bf16-mixed", scaler=GradScaler("cpu")),
            MisconfigurationException,
            "does not use a sc",
        ),
        (
            lambda: MixedPrecision(Static(8), precision="bf16-mixed"),
            ValueError,
            r"needs no loss scaling.*CheckOnly\(\)",
        ),
        (
            lambda: MixedPrecision(precision="bf16-mixed", scaler=GradScaler("cpu")),
            MisconfigurationException,
            "does not use a scaler",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_lbfgs_is_refused_as_by_lightning() -> None:
    class Lbfgs(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(Exception, match="LBFGS optimizer are not compatible"):
        fit(Lbfgs(), ours())


def test_weights_are_those_of_lightnings_plugin_where_it_is_right() -> None:
    module, lightnings = Regression(bad=(5,)), Regression(bad=(5,))
    fit(module, ours(), max_epochs=4)
    fit(lightnings, theirs(), max_epochs=4)
    assert weights_of(module) == weights_of(lightnings)


def test_a_scaler_that_is_given_records_the_run(tmp_path: Path) -> None:
    scaler = GradScaler("cpu", policy="auto", record=tmp_path / "run.jsonl")
    fit(Regression(bad=(2,)), MixedPrecision(scaler=scaler))
    scaler._memory.recorder.close()
    lines: list[Any] = [read_line(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()][1:]
    assert [str(line.status) for line in lines] == ["applied", "applied", "overflow", "applied"]
