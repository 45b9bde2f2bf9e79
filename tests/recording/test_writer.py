"""The writer of a record: a file survives whatever happens to the process, and loggers get the same steps as rows."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.recording.files import flush, headers, on_demand, steps  # noqa: F401

from gradscale import Dynamic, Headroom, Seen, Static
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.numpy import LossScaler
from gradscale.policies.histogram import Histogram
from gradscale.recording import writer
from gradscale.recording.form import read_line
from gradscale.recording.writer import RecordFile, RunRecorder

pytestmark = pytest.mark.usefixtures("on_demand")


def half(*values: float) -> Any:
    return np.array(values, np.float16)


def train(scaler: LossScaler, count: int, bad: tuple[int, ...] = ()) -> None:
    for step in range(count):
        scaler.step({"w": half(1.0, np.inf if step in bad else 2.0)})


def test_a_step_is_a_line_with_what_the_rule_saw_of_it(tmp_path: Path) -> None:
    scaler = LossScaler(Headroom(), record=tmp_path / "run.jsonl")
    scaler.step({"w": half(3.0, 4.0)}, norm=True)
    scaler.step({"w": half(np.nan, 4.0), "v": half(np.inf, np.inf)})
    first, second = steps(tmp_path / "run.jsonl")
    assert (first.step, first.scale, first.status) == (0, 16.0, "applied")
    assert (first.norm, first.amax) == (np.float32(5.0 / 16), 0.25)
    assert (second.step, second.status, second.amax, second.norm) == (1, "overflow", np.inf, None)
    assert [tuple(getattr(each, name) for name in ("name", "kind", "count")) for each in second.culprits] == [
        ("w", "nan", 1),
        ("v", "inf", 2),
    ]


def test_the_header_has_the_policy_and_the_state_before_the_first_step(tmp_path: Path) -> None:
    rule = Dynamic(growth_interval=3)
    train(LossScaler(rule, record=str(tmp_path / "run.jsonl")), 5)
    (header,) = headers(tmp_path / "run.jsonl")
    assert header.saved() == (rule, rule.start(), 1.0)
    assert (header.framework, header.framework_version, header.format) == ("numpy", np.__version__, "FP16")
    assert (header.rank, header.ranks, header.resumed) == (0, 1, False)
    assert abs(header.started - time.time()) < 1000


def test_folders_are_made(tmp_path: Path) -> None:
    train(LossScaler(record=tmp_path / "a" / "b" / "run.jsonl"), 1)
    assert len(steps(tmp_path / "a" / "b" / "run.jsonl")) == 1


def test_a_relative_path_is_that_of_the_folder_where_the_scaler_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    scaler = LossScaler(record="run.jsonl")
    for folder in ("other", ".."):
        monkeypatch.chdir(folder)
        train(scaler, 1)
        flush()
    assert len(steps(tmp_path / "run.jsonl")) == 2
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_the_share_that_a_policy_watches_is_recorded(tmp_path: Path) -> None:
    scaler = LossScaler(Histogram(), record=tmp_path / "run.jsonl")
    scaler.step({"w": half(1.0, 30000.0)})
    assert steps(tmp_path / "run.jsonl")[0].share == 0.5


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    scaler = LossScaler(record=tmp_path / "run.jsonl")
    scaler.step({"w": half(1.0)}, loss=np.float32(np.nan))
    assert [step.status for step in steps(tmp_path / "run.jsonl")] == ["nonfinite_loss"]


def test_a_step_without_gradients_is_none(tmp_path: Path) -> None:
    scaler = LossScaler(record=tmp_path / "run.jsonl")
    scaler.step({})
    train(scaler, 2)
    assert [step.step for step in steps(tmp_path / "run.jsonl")] == [0, 1]


def test_notes_belong_to_the_step_that_comes_next(tmp_path: Path) -> None:
    scaler = LossScaler(record=tmp_path / "run.jsonl")
    scaler.note(loss=0.5)
    scaler.note(lr=1e-3, tokens=123456789)
    train(scaler, 2)
    scaler.note(loss=np.float32(0.1))
    train(scaler, 1)
    assert [step.note for step in steps(tmp_path / "run.jsonl")] == [
        {"loss": 0.5, "lr": 0.001, "tokens": 123456789.0},
        {},
        {"loss": 0.100000001},  # in the digits of float32
    ]


def test_without_a_record_notes_are_not_kept() -> None:
    scaler = LossScaler()
    scaler.note(loss=1.0)
    assert scaler._recorder._notes == {}


def test_a_run_that_is_resumed_appends(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = LossScaler("dynamic", record=path)
    train(first, 3, bad=(1,))
    second = LossScaler("dynamic", record=path)
    flush()
    second.load_state_dict(first.state_dict())
    train(second, 2)
    assert [step.step for step in steps(path)] == [0, 1, 2, 3, 4]
    assert [header.resumed for header in headers(path)] == [False, True]
    assert headers(path)[1].saved().state == first.state


def test_a_state_that_was_loaded_begins_a_new_part(tmp_path: Path) -> None:
    scaler = LossScaler("dynamic", record=tmp_path / "run.jsonl")
    train(scaler, 2)
    saved = scaler.state_dict()
    train(scaler, 2)
    scaler.load_state_dict(saved)
    train(scaler, 1)
    assert [step.step for step in steps(tmp_path / "run.jsonl")] == [0, 1, 2, 3, 2]
    assert [int(header.saved().state.applied) for header in headers(tmp_path / "run.jsonl")] == [0, 2]


def test_a_line_that_was_torn_is_removed_before_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    train(LossScaler(record=path), 3)
    flush()
    whole = path.read_bytes()
    for torn in range(1, 40):
        path.write_bytes(whole[:-torn])
        train(LossScaler(Static(1.0), record=path), 1)
        assert [step.step for step in steps(path)] == [0, 1, 0]


def test_a_header_that_was_torn_is_written_anew(tmp_path: Path) -> None:
    for torn in ("", "{", '{"gradscale":', '{"gradscale":"0.1","sch'):
        path = tmp_path / f"{len(torn)}.jsonl"
        path.write_text(torn)
        train(LossScaler(record=path), 1)
        assert [header.resumed for header in headers(path)] == [False]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_another_file_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    scaler = LossScaler(record=path)
    train(scaler, 3)
    flush()
    assert path.read_text() == "my notes"
    assert said(caplog) == [
        f"Training goes on without its record in {path}: the file is no record, and begins with b'my notes'. "
        "This is logged once."
    ]
    assert scaler.metrics()["applied"] == 3
    assert not scaler._recorder.on


def test_a_folder_in_place_of_a_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(LossScaler(record=tmp_path), 3)
    assert len(said(caplog)) == 1
    assert "Is a directory" in said(caplog)[0]


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(writer, "open", refused, raising=False)  # a folder that is read-only does not stop root
    train(LossScaler(record=tmp_path / "run.jsonl"), 3)
    assert len(said(caplog)) == 1
    assert "Permission denied" in said(caplog)[0]


SMALL_DISK = """
import resource, sys
import numpy as np
from gradscale.numpy import LossScaler
from gradscale.recording import writer
writer.FLUSH_S = 0.001
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
scaler = LossScaler(record=sys.argv[1])
for step in range(2000):
    scaler.step({"w": np.float16([1.0])})
    if step % 10 == 0:
        import time; time.sleep(0.002)
print(scaler.state.applied)
"""


def child(program: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )


def test_a_disk_that_is_full_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    ended = child(SMALL_DISK, path)
    assert (ended.returncode, ended.stdout) == (0, "2000\n")
    assert ended.stderr.count("Training goes on without its record") == ended.stderr.count("\n") == 1
    assert "File too large" in ended.stderr
    *whole, _ = path.read_bytes().split(b"\n")
    assert [read_line(line) for line in whole[1:]]


def test_what_is_in_memory_is_written_when_the_process_ends(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
from gradscale.numpy import LossScaler
scaler = LossScaler(record=sys.argv[1])
for _ in range(7):
    scaler.step({"w": np.float16([1.0])})
raise SystemExit(3)
"""
    ended = child(program, tmp_path / "run.jsonl")
    assert (ended.returncode, ended.stderr) == (3, "")
    assert [step.step for step in steps(tmp_path / "run.jsonl")] == list(range(7))


def test_what_a_scaler_has_left_in_memory_is_written_when_the_process_ends(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
from gradscale.numpy import LossScaler
scaler = LossScaler(record=sys.argv[1])
scaler.step({"w": np.float16([1.0])})
del scaler
"""
    assert child(program, tmp_path / "run.jsonl").returncode == 0
    assert len(steps(tmp_path / "run.jsonl")) == 1


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # JAX
def test_a_fork_does_not_write_what_its_parent_does(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    scaler = LossScaler(record=path)
    train(scaler, 2)
    pid = os.fork()
    if pid == 0:
        try:
            train(scaler, 2)
            flush()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    train(scaler, 1)
    assert [step.step for step in steps(path)] == [0, 1, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_does_not_write(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    path = tmp_path / "run.jsonl"
    scaler = LossScaler(record=path)
    train(scaler, 2)
    other = copied(scaler)
    other.note(loss=1.0)
    train(other, 2)
    train(scaler, 1)
    assert other.metrics()["applied"] == 4
    assert [step.step for step in steps(path)] == [0, 1, 2]


def test_rank_0_writes_for_all(tmp_path: Path) -> None:
    for rank in range(3):
        recorder = RunRecorder(tmp_path / "run.jsonl", "numpy", lambda rank=rank: (rank, 3))
        recorder.add(
            Static(1.0), Static(1.0).start(), Static(1.0).start(), {"step": 0, "scale": 1.0, "status": Status.APPLIED}
        )
        assert recorder.on == (rank == 0)
    (header,) = headers(tmp_path / "run.jsonl")
    assert (header.rank, header.ranks) == (0, 3)


def test_every_rank_writes_a_file_of_its_own_where_the_name_says_so(tmp_path: Path) -> None:
    rows: list[Any] = []
    for rank in range(3):
        target = [tmp_path / "run-{rank}.jsonl", lambda row, step: rows.append(row)]
        recorder = RunRecorder(target, "numpy", lambda rank=rank: (rank, 3))
        recorder.add(
            Static(1.0), Static(1.0).start(), Static(1.0).start(), {"step": 0, "scale": 1.0, "status": Status.APPLIED}
        )
    assert [headers(tmp_path / f"run-{rank}.jsonl")[0].rank for rank in range(3)] == [0, 1, 2]
    assert len(rows) == 1


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"`record` takes the path of a file, .* or a list of them. Received: 3 \(int\)"
    ):
        LossScaler(record=3)


def test_a_function_gets_a_row_of_every_step() -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    train(LossScaler("dynamic:init_scale=8", record=lambda row, step: rows.append((step, row))), 3, bad=(1,))
    assert [step for step, _ in rows] == [0, 1, 2]
    assert rows[1][1] == {
        "gradscale/scale": 8.0,
        "gradscale/applied": 1.0,
        "gradscale/skipped": 1.0,
        "gradscale/skip_rate": 0.5,
    }


def test_a_norm_is_logged_unscaled_and_left_out_after_an_overflow() -> None:
    rows: list[dict[str, float]] = []
    scaler = LossScaler(Static(4.0), record=lambda row, step: rows.append(row))
    scaler.step({"w": half(12.0, 16.0)}, norm=True)
    scaler.step({"w": half(np.inf)}, norm=True)
    assert [row.get("gradscale/grad_norm") for row in rows] == [5.0, None]


def test_a_logger_that_raises_is_left_out_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(row: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    rows: list[int] = []
    scaler = LossScaler(record=[broken, lambda row, step: rows.append(step)])
    train(scaler, 3)
    assert rows == [0, 1, 2]
    assert len(said(caplog)) == 1
    assert "no route" in said(caplog)[0]


def test_other_loggers_get_a_row_a_second_and_every_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logger:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.steps.append(step)

    now = 0.0
    monkeypatch.setattr(writer, "FLUSH_S", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    logger = Logger()
    scaler = LossScaler("dynamic", record=logger)
    for step in range(30):
        now = 10 + step / 10
        scaler.step({"w": half(np.inf if step == 15 else 1.0)})
    assert logger.steps == [0, 10, 15, 25]


def test_seconds_are_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    scaler = LossScaler(record=tmp_path / "run.jsonl")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(RecordFile, "add", lambda self, line: self._lines.append(line))
    monkeypatch.setattr(writer, "FLUSH_S", 1.0)
    for step in range(25):
        now = 5 + step / 10
        train(scaler, 1)
    assert {step.step: step.seconds for step in steps(tmp_path / "run.jsonl") if step.seconds} == {10: 1.0, 20: 2.0}


def test_a_step_that_is_made_again_keeps_its_notes(tmp_path: Path) -> None:
    rule = Static(1.0)
    before, after = rule.start(), rule.start()
    recorder = RunRecorder(tmp_path / "run.jsonl", "numpy")
    recorder.note(0, {"loss": 1.0})
    recorder.add(rule, before, after, {"step": 0, "scale": 1.0, "status": Status.APPLIED})
    recorder.add(rule, before, after, {"step": 0, "scale": 1.0, "status": Status.OVERFLOW})
    assert [(step.status, step.note) for step in steps(tmp_path / "run.jsonl")] == [
        ("applied", {"loss": 1.0}),
        ("overflow", {"loss": 1.0}),
    ]
    assert len(headers(tmp_path / "run.jsonl")) == 1


class Late:
    """A copy of a number on its way to the host."""

    arrived = False

    def read(self) -> list[float]:
        assert self.arrived
        return [2.5]


def test_what_arrives_late_is_written_with_a_later_step(tmp_path: Path) -> None:
    rule, late, culprits = Static(1.0), Late(), list[Culprit]()
    states = [rule.start() for _ in range(4)]
    recorder = RunRecorder(tmp_path / "run.jsonl", "numpy")
    recorder.note(0, {"loss": late, "lr": 1.0})

    def later() -> Any:
        return {"culprits": culprits} if culprits else None

    for index in range(3):
        known = {"step": index, "scale": 1.0, "status": Status.APPLIED}
        recorder.add(rule, states[index], states[index + 1], known, later=later if index == 0 else dict)
        late.arrived = True
        if index == 1:
            culprits.append(Culprit("w", "inf"))
    found = steps(tmp_path / "run.jsonl")
    assert [step.step for step in found] == [0, 1, 0, 2]
    assert (found[0].note, found[0].culprits) == ({"lr": 1.0}, ())
    assert (found[2].note, found[2].culprits) == ({"lr": 1.0, "loss": 2.5}, tuple(culprits))


def test_what_has_not_arrived_when_the_process_ends_is_not_waited_for(tmp_path: Path) -> None:
    rule = Static(1.0)
    recorder = RunRecorder(tmp_path / "run.jsonl", "numpy")
    recorder.note(0, {"loss": Late()})
    recorder.add(rule, rule.start(), rule.start(), {"step": 0, "scale": 1.0, "status": Status.APPLIED})
    recorder.close()
    assert len(steps(tmp_path / "run.jsonl")) == 1


def test_a_line_has_at_most_150_bytes_with_norm_amax_loss_and_rate(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scaler = LossScaler(record=tmp_path / "run.jsonl")
    for step in range(200):
        scaler.note(loss=float(np.float32(random.random() * 10)), lr=3e-4 * (1 - step / 1000))
        scaler.step({"w": random.standard_normal(100).astype(np.float16)}, norm=True)
    sizes = [len(line) for line in (flush(), (tmp_path / "run.jsonl").read_bytes().splitlines())[1][1:]]
    assert sum(sizes) / len(sizes) <= 150


def test_the_record_of_a_run_is_replayed_exactly(tmp_path: Path) -> None:
    random, path = np.random.default_rng(1), tmp_path / "run.jsonl"
    for rule in (Headroom(), Dynamic(growth_interval=5)):
        scaler = LossScaler(rule, record=path)
        scales = []
        for _ in range(100):
            scales.append(scaler.loss_scale)
            values = random.standard_normal(8) * 2.0 ** random.integers(-6, 2) * scaler.loss_scale
            with np.errstate(over="ignore"):
                scaler.step({"w": values.astype(np.float16)})
        flush()
        state: Any = headers(path)[-1].saved().state
        for step, scale in zip(steps(path)[-100:], scales, strict=True):
            assert state.scale == step.scale == scale
            finite = np.bool_(step.status == "applied")
            amax = np.float32(np.inf if step.amax is None else step.amax)
            state = rule.next(state, Seen(finite=finite, amax=amax), np)
        assert json.dumps(state.to_dict()) == json.dumps(scaler.state.to_dict())
