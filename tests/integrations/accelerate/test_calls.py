"""The accelerator's own methods with an installed scaler: clipping, checkpoints, trackers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from benchmarks.traffic import Traffic
from tests.integrations.accelerate.run import Run, ours, torchs
from torch import nn

from gradscale import Dynamic
from gradscale.torch import GradScaler


def one_step(clip: Any) -> tuple[Any, list[float]]:
    """Returns what `clip` returns, and the gradient after it, for gradients that are 3 and 4."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    ours()(accelerator)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    returned = clip(accelerator, model.parameters())
    optimizer.step()
    return returned, model.weight.grad.flatten().tolist()


def test_norm_that_clipping_returns_is_of_unscaled_gradients() -> None:
    norm, grad = one_step(lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, 2.5))
    assert float(norm) == 5.0
    assert grad == pytest.approx([1.5, 2.0], rel=1e-6)


def test_clipping_unscales_and_clips_in_one_pass() -> None:
    written = {}
    for place in (ours(), torchs()):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        place(accelerator)
        model = nn.Linear(2, 1, bias=False)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
        with Traffic([model.weight.grad]) as traffic:
            accelerator.clip_grad_norm_(model.parameters(), 2.5)
        written[type(accelerator.scaler)] = (traffic.passes_read, traffic.passes_written)
    assert written == {GradScaler: (2, 1), torch.amp.GradScaler: (3, 2)}


@pytest.mark.parametrize("bound", [float("inf"), 0.0])
def test_bounds_that_are_no_numbers_above_zero_do_what_they_do_in_torch(bound: float) -> None:
    norm, grad = one_step(lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, bound))
    assert float(norm) == 5.0
    assert grad == ([3.0, 4.0] if bound else [0.0, 0.0])


def test_norm_of_a_part_of_the_parameters_is_theirs() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    ours()(accelerator)
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(3.0 * model[0].sum() + 4.0 * model[1].sum())
    assert accelerator.clip_grad_norm_([model[0]], 1.5) == 3.0
    optimizer.step()
    assert [each.item() for each in model] == pytest.approx([-1.5, -4.0], rel=1e-6)


def test_clipping_by_value_clips_unscaled_gradients() -> None:
    _, grad = one_step(lambda accelerator, parameters: accelerator.clip_grad_value_(parameters, 3.5))
    assert grad == [3.0, 3.5]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["auto", Dynamic(init_scale=256.0, growth_interval=3, hysteresis=2)])
def test_loaded_run_continues_bit_exactly(policy: Any, fused: bool, tmp_path: Path) -> None:
    whole = Run(ours(policy), fused=fused).train(1, bad_steps=[1])
    whole.accelerator.save_state(str(tmp_path))
    saved = whole.scaler.state_dict()
    whole.train(2, bad_steps=[5, 6])
    resumed = Run(ours(policy), fused=fused)
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.scaler.state_dict() == saved
    resumed.losses = [0.0] * 4
    resumed.train(2, bad_steps=[5, 6])
    assert all(map(torch.equal, whole.parameters, resumed.parameters))
    assert whole.scaler.state_dict() == resumed.scaler.state_dict()
    assert whole.losses[4:] == resumed.losses[4:]
    assert whole.schedule_steps == resumed.schedule_steps


@pytest.mark.parametrize("policy", ["torch", "auto"])
def test_state_that_was_saved_with_torchs_scaler_is_loaded(policy: str, tmp_path: Path) -> None:
    before = Run(torchs(growth_interval=7)).train(1, bad_steps=[1])
    before.accelerator.save_state(str(tmp_path))
    run = Run(ours(policy))
    run.accelerator.load_state(str(tmp_path))
    assert run.scaler.state_dict().items() >= before.scaler.state_dict().items()
    assert run.train(1).skips == [False] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_state_without_a_scaler_is_loaded_and_noted(
    precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Run(lambda accelerator: None, mixed_precision=precision).train(1)
    before.accelerator.save_state(str(tmp_path))
    run = Run(ours("check_only" if precision == "bf16" else "auto"), mixed_precision=precision)
    run.accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, before.parameters, run.parameters))
    assert run.schedule_steps == before.schedule_steps == 4
    assert "There is no scaler.pt in the checkpoint" in caplog.text
    assert run.accelerator.scaler is run.scaler
    assert run.train(1).skips == [False] * 4
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer\.bin"):
        run.accelerator.load_state(str(tmp_path))


class Kept(GeneralTracker):
    """A tracker that keeps what is logged."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values))


def test_trackers_get_the_metrics_of_the_scaler() -> None:
    kept = Kept()
    run = Run(ours("auto"), fused=True, log_with=kept)
    run.accelerator.init_trackers("run")
    run.train(1, bad_steps=[1])
    given = {"loss": 1.0}
    run.accelerator.log(given, step=4)
    assert given == {"loss": 1.0}
    [(step, row)] = kept.rows
    names = ("scale", "applied", "skipped", "skip_rate", "grad_norm", "headroom_bits")
    assert (step, set(row)) == (4, {"loss", *(f"gradscale/{name}" for name in names)})
    assert row["gradscale/scale"] == run.scaler.get_scale()
    assert row["gradscale/grad_norm"] == run.norms[-1]
    assert row["gradscale/skipped"] == sum(run.skips) >= 1
    assert row["gradscale/skip_rate"] == sum(run.skips) / 4


def test_nothing_is_added_before_the_first_step_nor_if_not_wanted() -> None:
    for how, steps in (({}, 0), ({"log": False}, 1)):
        kept = Kept()
        run = Run(ours(**how), log_with=kept)
        run.accelerator.init_trackers("run")
        run.train(steps)
        run.accelerator.log({"loss": 1.0})
        assert kept.rows == [(None, {"loss": 1.0})]


def test_norm_is_not_logged_where_nothing_was_clipped() -> None:
    kept = Kept()
    run = Run(ours(), clip=None, log_with=kept)
    run.accelerator.init_trackers("run")
    run.train(1)
    run.accelerator.log({})
    assert set(kept.rows[0][1]) == {f"gradscale/{name}" for name in ("scale", "applied", "skipped", "skip_rate")}


@pytest.mark.parametrize("how", [None, {"enabled": False}, {"init_scale": 64.0}])
def test_other_scaler_that_is_set_later_is_used_as_by_accelerate(how: dict[str, Any] | None) -> None:
    def place(accelerator: Any) -> Any:
        accelerator.native_amp = True
        accelerator.scaler = None if how is None else torch.amp.GradScaler("cpu", **how)
        return accelerator.scaler

    def place_after_install(accelerator: Any) -> Any:
        ours()(accelerator)
        return place(accelerator)

    without, run = Run(place, clip=None).train(1), Run(place_after_install, clip=None).train(1)
    assert all(map(torch.equal, run.parameters, without.parameters))
    accelerator: Any = run.accelerator
    assert accelerator.scaler_metrics() == {}
    accelerator.free_memory()


def test_prepared_optimizer_is_pickled_as_before() -> None:
    run = Run(ours(), fused=True).train(1, bad_steps=[3])
    assert run.optimizer.step_was_skipped
    copied = pickle.loads(pickle.dumps(run.optimizer))
    assert copied.step_was_skipped
    assert copied.state_dict()["param_groups"] == run.optimizer.state_dict()["param_groups"]


def test_accelerator_is_pickled_as_before() -> None:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    scaler = ours("auto")(accelerator)
    accelerator.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2))))
    copied = pickle.loads(pickle.dumps(accelerator))
    assert type(copied) is type(accelerator)
    assert copied.scaler.state_dict() == scaler.state_dict()
    assert len(copied._dataloaders) == 1


def test_prepared_twice_is_prepared_once() -> None:
    run = Run(ours(), fused=True)
    assert run.accelerator.prepare(run.optimizer) is run.optimizer
    assert run.train(1, bad_steps=[0]).skips == [True, False, False, False]
