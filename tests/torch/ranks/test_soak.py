"""Training with faults on single ranks: every rank decides alike, and all of them as one process does."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.torch.ranks.faults import Place, draw_faults
from tests.torch.ranks.gpt import BATCH, EXACT, GPT, LENGTH, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, case
from tests.torch.ranks.soak import SCALERS, Report, Run, places_of, train, train_each

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

SHORT, LONG = 40, 2000


def scalers_of(layout: str) -> list[str]:
    return [
        scaler
        for scaler in SCALERS
        if (not scaler.endswith("that always agrees") or layout.startswith("DDP"))
        and (scaler != "GradScaler" or LAYOUTS[layout].schedule is None)  # it has no stages without a loss, as torch's
    ]


CASES = [case(layout, scaler) for layout in LAYOUTS for scaler in scalers_of(layout)]


@functools.cache
def run_of(scaler: str, steps: int, ranks: int, places: Sequence[Place], exact: bool) -> Run:
    return Run(scaler, steps, draw_faults(steps, ranks, places), exact, digest_every=steps // 10)


@functools.cache
def on_one_process(*chosen: object) -> Report:
    return train(run_of(*chosen), None)  # type: ignore[arg-type]


def check_replicas(reports: Sequence[Report]) -> None:
    for report in reports[1:]:
        assert report.statuses == reports[0].statuses
        assert report.scales == reports[0].scales
        assert report.norms == reports[0].norms
        assert report.state == reports[0].state
        assert report.digests == reports[0].digests


def check_decisions(found: Report, one: Report) -> None:
    """Checks statuses, scales and norms against those of one process."""
    assert found.statuses == one.statuses
    assert found.scales == one.scales
    assert found.norms == pytest.approx(one.norms, rel=1e-6)


def check_exact(reports: Sequence[Report], one: Report) -> None:
    check_replicas(reports)
    check_decisions(reports[0], one)
    assert reports[0].state == one.state
    assert reports[0].digests == one.digests


def check_clipped(reports: Sequence[Report], one: Report) -> None:
    check_replicas(reports)
    # Sums are rounded in another order: by 1e-7 of a gradient, and from step to step a little more.
    assert reports[0].statuses == one.statuses
    assert reports[0].scales == one.scales
    assert reports[0].norms == pytest.approx(one.norms, rel=1e-4)
    torch.testing.assert_close(reports[0].weights, one.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", [case(layout) for layout in LAYOUTS])
def test_ranks_train_and_clip_as_one_process(layout: str, tmp_path: Path) -> None:
    """All runs of a layout in the same processes: starting these takes longer than a run."""
    ranks = LAYOUTS[layout].ranks
    exact = [(scaler, SHORT, ranks, places_of(layout, scaler), True) for scaler in scalers_of(layout)]
    clipped = "LossScaler", SHORT // 2, ranks, places_of(layout, "LossScaler"), False
    found = run_ranks(ranks, train_each, [run_of(*chosen) for chosen in (*exact, clipped)], layout, folder=tmp_path)
    *of_exact, of_clipped = zip(*found, strict=True)
    for chosen, reports in zip(exact, of_exact, strict=True):
        with named(f"{chosen[0]}, exact"):
            check_exact(reports, on_one_process(*chosen))
    with named("LossScaler, clipped"):
        check_clipped(of_clipped, on_one_process(*clipped))


@contextmanager
def named(run: str) -> Iterator[None]:
    """Adds to a failure which run it is of."""
    try:
        yield
    except AssertionError as error:
        error.add_note(run)
        raise


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("layout", "scaler"), CASES)
def test_ranks_train_as_one_process_for_long(layout: str, scaler: str, tmp_path: Path) -> None:
    chosen = scaler, LONG, LAYOUTS[layout].ranks, places_of(layout, scaler), True
    reports = run_ranks(LAYOUTS[layout].ranks, train, run_of(*chosen), layout, folder=tmp_path)
    check_exact(reports, on_one_process(*chosen))


def test_gradients_of_the_exact_model_have_no_rounding() -> None:
    single, double = GPT(EXACT), GPT(EXACT).double()
    for step in range(SHORT):
        inputs, targets = batch_of(step)
        for model in (single, double):
            model.zero_grad()
            EXACT.loss(model(inputs), targets).backward()
        for one, other in zip(single.parameters(), double.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad.double(), other.grad)
            # In units of the mean's factor they are whole numbers, and partial sums of float32 are exact below 2**24.
            whole = one.grad * (BATCH * LENGTH)
            assert torch.equal(whole, whole.round())
            assert whole.abs().max() < 2.0**20
            with torch.no_grad():
                one -= one.grad * 2.0**-8
                other.copy_(one)


def test_the_faults_skip_steps_of_both_kinds_and_the_scale_falls_and_grows() -> None:
    one = on_one_process("LossScaler", SHORT, 2, places_of("FSDP2 on 2", "LossScaler"), True)
    assert set(one.statuses) == {"applied", "overflow", "nonfinite_loss"}
    changes = [after / before for before, after in zip(one.scales, one.scales[1:], strict=False)]
    assert set(changes) == {0.5, 1.0, 2.0}
