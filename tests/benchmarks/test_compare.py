"""A comparison: a row for each side, measured against torch's scaler."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from benchmarks.sides import BARE, TORCH, Case
from benchmarks.step import Measured, compare

from gradscale import Dynamic

LARGE = [(32_768,), (256, 128)]


def rows(optimizer: type[torch.optim.Optimizer], clip: float | None, **settings: bool) -> dict[str, Measured]:
    case = Case("a case", LARGE, partial(optimizer, **settings), clip)
    return {row.side: row for row in compare(case, Dynamic(), repeats=3)}


def test_every_side_is_timed() -> None:
    found = rows(torch.optim.AdamW, None, fused=True)
    assert list(found) == [TORCH, "LossScaler", "drop-in GradScaler", BARE]
    assert all(row.median_ms > 0 for row in found.values())


def test_times_are_given_in_milliseconds_and_as_ratios_to_torchs_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {TORCH: [2.0, 2.0, 4.0], "LossScaler": [1.0, 1.0, 4.0]}
    given = defaultdict(lambda: [2.0, 2.0, 2.0], seconds)
    monkeypatch.setattr("benchmarks.step.take_turns", lambda sides, repeats: given)
    found = rows(torch.optim.AdamW, None, fused=True)
    times = {name: (row.median_ms, row.times_torch, row.quartiles) for name, row in found.items()}
    assert times[TORCH] == (2000.0, 1.0, (1.0, 1.0))
    assert times["LossScaler"] == (1000.0, 0.5, (0.5, 0.75))
    assert times[BARE] == (2000.0, 1.0, (0.75, 1.0))


def test_passes_are_counted_with_those_of_the_update() -> None:
    found = rows(torch.optim.AdamW, 1.0, fused=True)
    passes = {name: (row.passes_read, row.passes_written) for name, row in found.items()}
    assert passes[TORCH] == (4.0, 2.0)
    assert passes["LossScaler"] == (2.0, 1.0)
    assert passes[BARE] == (3.0, 1.0)


def test_the_drop_in_is_gradscales() -> None:
    found = rows(torch.optim.AdamW, None, fused=True)
    assert (found[TORCH].passes_written, found["drop-in GradScaler"].passes_written) == (2.0, 1.0)


def test_host_reads_of_the_optimizer_itself_are_not_the_scalers() -> None:
    found = rows(torch.optim.AdamW, 1.0, foreach=True)
    assert [row.host_reads for row in found.values()] == [1, 1, 1, 0]
