"""What loggers are given, read back by their own readers: TensorBoard, W&B offline, and MLflow on SQLite.

W&B and MLflow have an environment of their own: `make test-loggers`.
"""

import importlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gradscale.engine.result import Status
from gradscale.histogram.counts import exponent_histogram
from gradscale.numpy import LossScaler
from gradscale.recording import writer
from gradscale.recording.form import Step, Watched
from gradscale.recording.loggers import logger_of

SCALES = {0: 8.0, 1: 8.0, 2: 8.0, 3: 4.0, 4: 4.0}
SKIPPED = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0}
NORMS = {0: 0.125, 1: 0.125, 3: 0.25, 4: 0.25}
others_warn = pytest.mark.filterwarnings("ignore")
"""Of what the loggers themselves call."""

NAMES = ["applied", "grad_norm", "headroom_bits", "scale", "skip_rate", "skipped"]


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FLUSH_S", 0.0)


def half(*values: float) -> Any:
    return np.array(values, np.float16)


def train(target: Any, run: Any = None) -> None:
    """Takes five steps, of which the third overflows. With the `run` of a user, who logs something at each."""
    scaler = LossScaler("dynamic:init_scale=8", record=target)
    for step in range(5):
        scaler.step({"w": half(np.inf if step == 2 else 1.0)}, norm=True)
        if run is not None:
            run.log({"loss": step / 2})


def test_tensorboard_reads_scale_skips_norms_and_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    # TensorBoard does without TensorFlow then, which must not be loaded before Triton.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path)) as log:
        train(log)
        counts = exponent_histogram(np.array([0.0, 1.0, 1.5, 0.25, 2.0**-30], np.float32))
        tallies = [Watched(f"layer {n}", "weight_grad", counts, 1.5, "float16", 8.0) for n in range(2)]
        logger_of(log).write({}, Step(step=3, scale=8.0, status=Status.APPLIED, watch=tallies))
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()

    def points(name: str) -> dict[int, float]:
        return {point.step: point.value for point in read.Scalars(f"gradscale/{name}")}

    assert sorted(read.Tags()["scalars"]) == [f"gradscale/{name}" for name in NAMES]
    assert (points("scale"), points("skipped"), points("grad_norm")) == (SCALES, SKIPPED, NORMS)
    assert read.Tags()["histograms"] == ["gradscale/log2_weight_grad"]
    (found,) = read.Histograms("gradscale/log2_weight_grad")
    value = found.histogram_value
    assert (found.step, value.min, value.max, value.num) == (3, -30.0, 1.0, 8.0)
    by_edge = dict(zip(value.bucket_limit, value.bucket, strict=True))
    assert {edge: count for edge, count in by_edge.items() if count} == {-29.0: 2.0, -1.0: 2.0, 1.0: 4.0}


def wandb_records(path: Path) -> Iterator[Any]:
    """Yields the records of an offline run: W&B's own messages, in the framing of LevelDB's logs."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = messages.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@others_warn
def test_an_offline_run_of_wandb_has_the_rows_beside_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        train(run, run)
    (path,) = tmp_path.rglob("*.wandb")
    records = list(wandb_records(path))
    rows = [
        {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["loss"] for row in rows] == [step / 2 for step in range(5)]
    assert {row["gradscale/step"]: row["gradscale/scale"] for row in rows} == SCALES
    assert {row["gradscale/step"]: row["gradscale/skipped"] for row in rows} == SKIPPED
    axes = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert ("gradscale/*", "gradscale/step") in {(metric.glob_name, metric.step_metric) for metric in axes}


@others_warn
def test_mlflow_on_sqlite_has_a_history_of_each_metric(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("test")
    with mlflow.start_run() as run:
        train(mlflow)
    client = mlflow.MlflowClient()

    def points(name: str) -> dict[int, float]:
        return {point.step: point.value for point in client.get_metric_history(run.info.run_id, f"gradscale/{name}")}

    assert sorted(client.get_run(run.info.run_id).data.metrics) == [f"gradscale/{name}" for name in NAMES]
    assert (points("scale"), points("skipped"), points("grad_norm")) == (SCALES, SKIPPED, NORMS)


def test_a_logger_of_lightning_is_one(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(str(tmp_path))
    train(logger)
    logger.save()
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("gradscale/scale")
    assert [float(row.split(",")[place]) for row in rows] == list(SCALES.values())
