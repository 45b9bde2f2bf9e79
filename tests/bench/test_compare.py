"""A comparison: a row for each side, measured against torch's scaler."""

from functools import partial

import torch

from gradscale import Dynamic
from gradscale.bench.compare import Measured, compare
from gradscale.bench.steps import BARE, TORCH, Case

LARGE = [(32_768,), (256, 128)]


def rows(optimizer: type[torch.optim.Optimizer], clip: float | None, **settings: bool) -> dict[str, Measured]:
    case = Case("a case", LARGE, partial(optimizer, **settings), clip)
    return {row.side: row for row in compare(case, Dynamic(), repeats=3)}


def test_every_side_is_timed_against_torchs_scaler() -> None:
    found = rows(torch.optim.AdamW, None, fused=True)
    assert list(found) == [TORCH, "LossScaler", "drop-in GradScaler", BARE]
    assert (found[TORCH].times_torch, found[TORCH].quartiles) == (1.0, (1.0, 1.0))
    for row in found.values():
        assert row.times_torch == row.median_ms / found[TORCH].median_ms
        assert 0 < row.quartiles[0] <= row.quartiles[1]


def test_passes_are_counted_with_those_of_the_update() -> None:
    found = rows(torch.optim.AdamW, 1.0, fused=True)
    passes = {name: (row.passes_read, row.passes_written) for name, row in found.items()}
    assert passes[TORCH] == (4.0, 2.0)
    assert passes["LossScaler"] == (2.0, 1.0)
    assert passes[BARE] == (3.0, 1.0)


def test_host_reads_of_the_optimizer_itself_are_not_the_scalers() -> None:
    found = rows(torch.optim.AdamW, 1.0, foreach=True)
    assert [row.host_reads for row in found.values()] == [1, 1, 1, 0]
