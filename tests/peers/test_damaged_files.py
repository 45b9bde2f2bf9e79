"""Damaged files of every kind end in a result or in a clear error, in a process with little memory."""

import ast
import sys
from pathlib import Path

import pytest
from tests.peers.limits import run_in_child
from tests.peers.real_files import real_files

from gradscale import Static
from gradscale.peers import import_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")

BACKOFF = {"iteration": 3, "last_overflow_iteration": 1, "scale": 8.0}


def counts_of(folder: Path, seed: int, count: int) -> dict[str, int]:
    """Returns how many damaged files were read, refused, or neither."""
    pytest.importorskip("typer", reason="files to replay are read by the command line")
    for name, data in real_files().items():
        (folder / name).write_bytes(data)
    ended = run_in_child("tests.peers.read_damaged_files", str(folder), str(seed), str(count))
    *wrong, counts = ended.stdout.splitlines() or [""]
    assert ended.returncode == 0, (ended.stderr[-3000:], wrong[-1:], counts)
    assert not wrong, "\n".join(line[-1000:] for line in wrong[:10])
    return ast.literal_eval(counts)


def test_the_files_are_read_before_they_are_damaged() -> None:
    for name, data in real_files().items():
        if (system := name.partition("-")[0]) not in ("saved", "replay"):
            import_state(system, data)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    counts = counts_of(tmp_path, seed=1, count=600)
    assert counts["read"] > 20
    assert counts["refused"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_damaged_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    counts = counts_of(tmp_path, seed, count=12_500)
    assert sum(counts.values()) == 12_500


@pytest.mark.parametrize(
    ("system", "values", "message"),
    [
        ("flax", {"fin_steps": 1, "scale": 1e39}, "`scale` .* must fit a float32 tensor"),
        ("jmp", {"loss_scale": 1e39, "counter": 1}, "`loss_scale` .* must fit a float32 tensor"),
        ("keras", {"step_counter": 1, "dynamic_scale": 1e39}, "`dynamic_scale` .* must fit a float32 tensor"),
        (
            "tf-keras",
            {"current_loss_scale": 1e39, "good_steps": 1},
            "`current_loss_scale` .* must fit a float32 tensor",
        ),
        ("mindspore", {"scale_value": 1e39, "counter": 1}, "`scale_value` .* must fit a float32 tensor"),
        ("openseq2seq", BACKOFF | {"step_factor": 1e300}, "must lie between 2.*1e.300"),
        ("openseq2seq", BACKOFF | {"scale": 1e39}, "`scale` .* must fit a float32 tensor"),
        ("popart", {"lossScaling": 1.0, "lossScaleUpdateFactor": 1e39}, "must fit a float32 tensor"),
    ],
)
def test_a_number_that_the_system_cannot_hold_is_refused(system: str, values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_state(system, values)


def test_a_static_scale_of_a_version_with_hysteresis_is_read() -> None:
    saved = {"dynamic_loss_scale": False, "cur_scale": 64.0, "cur_iter": 3, "cur_hysteresis": 2}
    assert import_state("deepspeed", saved)[0] == Static(64.0)


def test_keras_variables_inside_themselves_are_refused() -> None:
    endless: dict[str, object] = {}
    endless["optimizer"] = endless
    with pytest.raises(ValueError, match="Keras's LossScaleOptimizer saves the keys"):
        import_state("keras", endless)
