"""A dead run of the drop-in: reported once, by a warning with the likely cause; and the metrics."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import HostReads, batches, give, linear_pair, parameter, ready
from torch import Tensor, nn

from gradscale import Headroom, Static, Status
from gradscale.engine.metrics import METRICS
from gradscale.torch import GradScaler, ScaleStuck

INF, NAN = math.inf, math.nan

late = pytest.mark.cpu_only("a device is read a few steps late")
autocast = pytest.mark.cpu_only("autocast of the CPU")


def dead_run(scaler: Any, optimizer_of: Any, steps: int = 80, bad_from: int | None = None) -> nn.Sequential:
    """Returns a model after a run in FP16; from the step `bad_from` on, its loss is NaN."""
    model = linear_pair()
    optimizer = optimizer_of(model.named_parameters())
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss * (NAN if bad_from is not None and step >= bad_from else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@autocast
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "lr"), [(torch.optim.Adam, 1e5), (torch.optim.SGD, 1e3)])
def test_exploding_learning_rate_is_warned_of_once(kind: Any, lr: float, fused: bool) -> None:
    with pytest.warns(
        UserWarning, match=r"^\d+ steps in a row were skipped, and the loss is .* since step \d\."
    ) as caught:
        dead_run(GradScaler("cpu"), lambda params: kind(params, lr=lr, fused=fused), steps=150)
    assert len(caught) == 1
    assert f"Likely cause: the learning rate ({lr:g}) is too high" in str(caught[0].message)


@autocast
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("fused", [False, True])
def test_loss_that_is_nan_is_named_with_its_first_step(fused: bool) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=5, on_stuck="raise")
    with pytest.raises(ScaleStuck, match=r"NaN since step 12\. The loss was inf or NaN in .* No scale"):
        dead_run(scaler, lambda params: torch.optim.SGD(params, lr=1e-3, fused=fused), bad_from=11)


def gradients(scaler: GradScaler, *grads: float, optimizer: Any = None, owner: Any = None) -> None:
    """Makes a step with each of the gradients."""
    owner = parameter() if owner is None else owner
    optimizer = torch.optim.SGD([("head", owner)], lr=0.0) if optimizer is None else optimizer
    for grad in grads:
        ready(scaler)
        give((owner, grad))
        scaler.step(optimizer)
        scaler.update()


@late
def test_gradients_that_overflow_at_a_scale_below_one_are_stuck_and_at_a_high_one_are_not() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**60, max_consecutive_skips=5, on_stuck="raise")
    gradients(scaler, *[INF] * 60)
    assert scaler.get_scale() == 1.0
    with pytest.raises(ScaleStuck, match=r"^61 steps in a row were skipped, every step so far, .*'head', overflows"):
        gradients(scaler, INF)


@late
@pytest.mark.parametrize("arguments", [{"min_scale": 128.0, "init_scale": 256.0}, {"policy": Static(1024.0)}])
def test_floor_and_policy_decide_what_the_lowest_scale_is(arguments: Any) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=3, on_stuck="raise", **arguments)
    gradients(scaler, INF, INF)
    with pytest.raises(ScaleStuck, match="3 steps in a row were skipped"):
        gradients(scaler, INF)


@late
def test_error_is_raised_when_the_update_is_complete() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, max_consecutive_skips=1, on_stuck="raise")
    for scale in (0.5, 0.25):
        with pytest.raises(ScaleStuck):
            gradients(scaler, INF)
        assert scaler.get_scale() == scale
    gradients(scaler, 1.0)
    assert scaler.metrics()["applied"] == 1


@late
def test_function_is_called_and_silence_is_kept() -> None:
    calls: list[ScaleStuck] = []
    gradients(GradScaler("cpu", init_scale=1.0, max_consecutive_skips=2, on_stuck=calls.append), *[INF] * 5)
    assert [error.culprits[0].name for error in calls] == ["head"]
    gradients(GradScaler("cpu", init_scale=1.0, max_consecutive_skips=2, on_stuck="ignore"), *[INF] * 5)


@late
def test_warning_comes_again_after_an_applied_step_and_after_a_load() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, max_consecutive_skips=2)
    with pytest.warns(UserWarning, match="2 steps in a row were skipped") as caught:
        gradients(scaler, INF, INF, INF, 1.0, INF, INF)
    assert len(caught) == 2
    scaler.load_state_dict(scaler.state_dict())
    with pytest.warns(UserWarning, match="2 steps in a row were skipped"):
        gradients(scaler, INF, INF)


@late
def test_skip_of_one_of_two_optimizers_is_counted_and_named() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, max_consecutive_skips=2, on_stuck="raise")
    good, bad = parameter(), parameter()
    optimizers = [torch.optim.SGD([("bad", bad)], lr=0.1), torch.optim.SGD([("good", good)], lr=0.1)]

    def step() -> None:
        ready(scaler)
        give((good, 1.0), (bad, NAN))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    step()
    with pytest.raises(ScaleStuck, match=r"one parameter, 'bad', overflows"):
        step()


@late
def test_run_whose_gradients_are_only_unscaled_is_checked_too() -> None:
    scaler, owner = GradScaler("cpu", init_scale=1.0, max_consecutive_skips=2, on_stuck="raise"), parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    for step in range(2):
        ready(scaler)
        give((owner, NAN))
        scaler.unscale_(optimizer)
        if step == 0:
            scaler.update()
    with pytest.raises(ScaleStuck, match="2 steps in a row were skipped"):
        scaler.update()


@pytest.mark.parametrize(
    ("argument", "error"), [({"on_stuck": "shout"}, ValueError), ({"max_consecutive_skips": 0}, ValueError)]
)
def test_settings_that_cannot_be_are_refused(argument: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Received"):
        GradScaler("cpu", **argument)


@pytest.mark.parametrize("loss", [1.0, INF, NAN])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("either_way")
def test_status_of_a_skipped_step_says_whether_the_loss_was_finite(loss: float, fused: bool) -> None:
    owner = parameter()
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), torch.optim.SGD([owner], lr=0.1, fused=fused)
    scaler.scale(owner.sum() * loss).backward()
    give((owner, NAN))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last is not None
    assert scaler.last.status() is (Status.OVERFLOW if math.isfinite(loss) else Status.NONFINITE_LOSS)
    assert scaler.get_scale() == 4.0


def test_losses_of_an_update_are_forgotten_after_it_and_do_not_keep_their_graph() -> None:
    owner = parameter()
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), torch.optim.SGD([owner], lr=0.1)
    scaler.scale((owner * NAN).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last is not None
    assert scaler.last.status() is Status.NONFINITE_LOSS
    optimizer.zero_grad()
    scaler.scale([owner.sum(), owner * 2])[0].backward()
    give((owner, INF))
    scaler.step(optimizer)
    assert scaler.last.status() is Status.OVERFLOW
    assert not any(note.requires_grad for _, note in scaler._window.notes)  # type: ignore[union-attr]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("arguments", [{}, {"hysteresis": 2}, {"policy": Headroom(init_scale=2.0**16)}])
def test_metrics_have_the_keys_of_every_adapter(arguments: Any) -> None:
    scaler = GradScaler("cpu", **arguments)
    assert (tuple(scaler.metrics()), scaler.metrics()["scale"]) == (METRICS, 65536.0)
    gradients(scaler, 1.0, INF, 1.0, 1.0)
    metrics = scaler.metrics()
    assert (metrics["applied"], metrics["skipped"], metrics["skip_rate"]) == (3, 1, 0.25)
    assert metrics["scale"] == scaler.get_scale()
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["headroom_bits"]) is ("policy" not in arguments)


def test_disabled_scaler_has_metrics_too() -> None:
    metrics = GradScaler("cpu", enabled=False).metrics()
    assert (tuple(metrics), metrics["scale"], metrics["skipped"]) == (METRICS, 1.0, 0.0)


@late
def test_counts_of_a_policy_are_resumed_and_those_of_torchs_rule_start_anew() -> None:
    for source, expected in ((GradScaler("cpu", hysteresis=2), (2, 1)), (GradScaler("cpu"), (0, 0))):
        target = GradScaler("cpu")
        gradients(source, 1.0, INF, 1.0)
        target.load_state_dict(source.state_dict())
        assert (target.metrics()["applied"], target.metrics()["skipped"]) == expected


@late
def test_copy_counts_for_itself() -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=7, on_stuck="raise")
    gradients(scaler, 1.0, INF)
    for twin in (copy.copy(scaler), copy.deepcopy(scaler)):
        gradients(twin, 1.0)
        assert (twin.metrics()["applied"], scaler.metrics()["applied"]) == (2, 1)
        assert twin._memory._stuck_check.max_consecutive_skips == 7


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("fused", [False, True])
def test_counting_and_checking_do_not_synchronize(fused: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.0, fused=fused)
    scaler = GradScaler("cpu", on_stuck="ignore")
    for _ in range(40):
        ready(scaler)
        give((owner, INF))
        with HostReads() as reads:
            scaler.step(optimizer)
            scaler.update()
            scaler.metrics()
        assert reads.count == 0


def test_scale_inside_a_function_transform_leaves_nothing_behind() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)

    def loss(x: Tensor) -> Tensor:
        return scaler.scale(x.square().sum())

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [16.0, 16.0]
    assert not scaler._window.notes  # type: ignore[union-attr]


@autocast
def test_no_warning_for_a_healthy_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dead_run(GradScaler("cpu", init_scale=2.0**40), lambda params: torch.optim.AdamW(params, lr=1e-3))
