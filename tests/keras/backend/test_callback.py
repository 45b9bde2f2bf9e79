"""`ScaleMonitor`: what it reads, shows and records, and what it refuses."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import INF, LARGE, data, network, same, weights

from gradscale import Dynamic, NoScaling, Static, replay
from gradscale.keras import LossScaleOptimizer, ScaleMonitor, ScaleStuck
from gradscale.keras.callback import ScaleRow
from gradscale.recording.form import Header, read_line

SGD = keras.optimizers.SGD
six_batches = partial(data, batches=6)
SCALE = 2.0**80
POLICY = Dynamic(init_scale=SCALE, growth_interval=2)


def watched(
    monitor: ScaleMonitor,
    *bad: int,
    epochs: int = 1,
    later: Any = (),
    policy: Any = POLICY,
    target: float = LARGE,
) -> Any:
    """Returns a model after `fit` with the monitor, six batches in order to an epoch."""
    batches = six_batches(*bad, target=target)
    model = network()
    model.compile(LossScaleOptimizer(SGD(0.01), policy=policy), loss="mse")
    model.fit(*batches, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[monitor, *later])
    return model


def test_every_step_is_read_in_order() -> None:
    monitor = ScaleMonitor(every=1)
    watched(monitor, 2)
    assert monitor.rows == [
        ScaleRow(0, SCALE, 0, True),
        ScaleRow(1, SCALE, 0, True),
        ScaleRow(2, 2 * SCALE, 0, True),
        ScaleRow(3, SCALE, 1, False),
        ScaleRow(4, SCALE, 1, True),
        ScaleRow(5, 2 * SCALE, 1, True),
        ScaleRow(6, 2 * SCALE, 1, True),
    ]


def test_between_readings_a_skip_is_counted_though_not_placed() -> None:
    monitor = ScaleMonitor(every=4)
    watched(monitor, 2, epochs=2)
    assert [(row.step, row.skipped, row.finite) for row in monitor.rows] == [
        (0, 0, True),
        (4, 1, False),
        (6, 1, True),
        (8, 1, True),
        (12, 2, False),
    ]


def test_a_replay_of_the_record_takes_the_same_scales() -> None:
    monitor = ScaleMonitor(every=1)
    watched(monitor, 1, 4, epochs=2)
    again = replay(POLICY, found_inf=monitor.found_inf())
    assert again.scales.tolist() == [row.scale for row in monitor.rows[1:]]
    assert again.skipped.sum() == 4


def test_a_second_fit_continues_the_record() -> None:
    monitor = ScaleMonitor(every=1)
    model = watched(monitor)
    model.fit(*six_batches(0), batch_size=4, shuffle=False, verbose=0, callbacks=[monitor])
    assert [row.step for row in monitor.rows] == list(range(13))
    assert monitor.found_inf() == [False] * 6 + [True] + [False] * 5


def test_flags_of_steps_that_were_not_read_are_refused() -> None:
    monitor = ScaleMonitor(every=3)
    watched(monitor)
    with pytest.raises(ValueError, match=r"only if each was read.*up to 3 steps apart.*ScaleMonitor\(every=1\)"):
        monitor.found_inf()


class Later(keras.callbacks.Callback):
    """Keeps the logs that reach a callback further down the list."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch
        self.batches.append((logs["scale"], logs["skipped"]))


def test_history_and_later_callbacks_get_scale_and_skips(capsys: pytest.CaptureFixture[str]) -> None:
    later = Later()
    model = watched(ScaleMonitor(every=1), 2, epochs=2, later=[later])
    assert model.history.history["scale"] == [2 * SCALE, 4 * SCALE]
    assert model.history.history["skipped"] == [1, 2]
    # A batch shows what was read before it began.
    assert later.batches[:6] == [(SCALE, 0), (SCALE, 0), (2 * SCALE, 0), (SCALE, 1), (SCALE, 1), (2 * SCALE, 1)]
    model.fit(*six_batches(), batch_size=4, verbose=2, callbacks=[ScaleMonitor()])
    assert "scale: " in capsys.readouterr().out


def test_a_batch_does_not_synchronize_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    state = LossScaleOptimizer.state
    monkeypatch.setattr(LossScaleOptimizer, "state", property(lambda own: reads.append(1) or state.fget(own)))  # pyright: ignore
    watched(ScaleMonitor(every=100), epochs=2)
    assert len(reads) == 3  # the begin, and two ends of epochs


def test_no_scaling_is_shown_too() -> None:
    monitor = ScaleMonitor(every=3)
    watched(monitor, policy=NoScaling())
    assert monitor.rows == [ScaleRow(step, 1.0, 0, True) for step in (0, 3, 6)]


def test_tensorboard_gets_a_point_for_each_reading(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    watched(ScaleMonitor(every=3, log_dir=tmp_path), 2)
    (file,) = tmp_path.iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for _, value in values} == {"scalars"}
    assert [(step, value.tag, float(tf.make_ndarray(value.tensor))) for step, value in values] == [
        (0, "scale", SCALE),
        (0, "skipped", 0.0),
        (3, "scale", SCALE),
        (3, "skipped", 1.0),
        (6, "scale", 2 * SCALE),
        (6, "skipped", 1.0),
    ]


def test_tensorboard_without_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"`log_dir` needs TensorFlow.*log_dir='logs'.*pip install tensorflow"):
        ScaleMonitor(log_dir="logs")


def test_an_optimizer_of_keras_own_is_refused() -> None:
    model = network()
    model.compile(keras.optimizers.LossScaleOptimizer(SGD()), loss="mse")
    with pytest.raises(
        TypeError, match=r"reads a `gradscale\.keras\.Loss.*compiled with keras\.src.*`gradscale\.keras\.adopt"
    ):
        model.fit(*six_batches(), verbose=0, callbacks=[ScaleMonitor()])


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_count_that_is_none_is_refused(every: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`every` must be"):
        ScaleMonitor(every=every)


def test_the_weights_are_those_of_a_run_without_it() -> None:
    watched_model = watched(ScaleMonitor(every=1), 2, epochs=2)
    alone = network()
    alone.compile(LossScaleOptimizer(SGD(0.01), policy=POLICY), loss="mse")
    alone.fit(*six_batches(2, target=LARGE), batch_size=4, epochs=2, shuffle=False, verbose=0)
    for left, right in zip(watched_model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def stuck_model(monitor: ScaleMonitor, *bad: int) -> Any:
    """Returns a model that did not get through `fit`, because a reading raised."""
    model = network()
    model.compile(LossScaleOptimizer(SGD(0.01), policy=Static(1024.0)), loss="mse")
    with pytest.raises(
        ScaleStuck, match=r"^3 steps in a row.*and the loss is inf or NaN\. No scale, retry or policy can help"
    ):
        model.fit(*six_batches(*bad), batch_size=4, shuffle=False, verbose=0, callbacks=[monitor])
    return model


def test_a_run_that_skips_every_step_ends_at_a_reading() -> None:
    monitor = ScaleMonitor(every=1, max_consecutive_skips=3)
    model = stuck_model(monitor, 0, 1, 2, 3)
    assert [row.step for row in monitor.rows] == [0, 1, 2, 3]
    assert same(weights(model), weights(network()))


def test_the_model_trains_on_after_it_was_stuck() -> None:
    model = stuck_model(ScaleMonitor(every=10, max_consecutive_skips=3), 3, 4, 5)
    model.fit(*six_batches(), batch_size=4, verbose=0, callbacks=[ScaleMonitor(max_consecutive_skips=3)])
    assert int(model.optimizer.state.applied) == 9


def test_a_scale_that_can_still_fall_is_not_stuck() -> None:
    model = network()
    model.compile(LossScaleOptimizer(SGD(0.01), policy=Dynamic(init_scale=SCALE)), loss="mse")
    inputs, targets = six_batches()
    monitor = ScaleMonitor(every=1, max_consecutive_skips=1)
    model.fit(inputs, np.full_like(targets, LARGE), batch_size=4, shuffle=False, verbose=0, callbacks=[monitor])
    assert int(model.optimizer.state.consecutive_skips) == 6


def test_a_loss_that_is_not_finite_is_stuck_at_any_scale() -> None:
    with pytest.raises(ScaleStuck, match="No scale, retry or policy can help"):
        watched(ScaleMonitor(every=10, max_consecutive_skips=3), 3, 4, 5, target=INF)


def test_a_stuck_run_whose_loss_is_not_finite_does_not_speak_of_gradients_that_are_not_known() -> None:
    with pytest.raises(
        ScaleStuck, match=r"^3 steps in a row were skipped, since step 4, and the loss is inf"
    ) as caught:
        watched(ScaleMonitor(every=10, max_consecutive_skips=3), 3, 4, 5, target=INF)
    assert "Gradients that were not finite" not in str(caught.value)


@pytest.mark.parametrize("rate", [30.0, 1e3])
def test_a_learning_rate_that_is_too_high_is_named_with_the_size_of_the_weights(rate: float) -> None:
    model = network()
    model.compile(LossScaleOptimizer(SGD(rate), policy=Dynamic(init_scale=1024.0)), loss="mse")
    with pytest.raises(
        ScaleStuck, match=rf"since step \d+, and the loss is inf.*the learning rate \({rate:g}\) is too"
    ):
        model.fit(*six_batches(), epochs=40, verbose=0, callbacks=[ScaleMonitor(every=1, max_consecutive_skips=3)])


def test_a_stuck_run_can_be_ignored() -> None:
    model = watched(ScaleMonitor(every=1, max_consecutive_skips=3, on_stuck="ignore"), 0, 1, 2, 3, 4, 5, target=INF)
    assert int(model.optimizer.state.consecutive_skips) == 6


def test_a_stuck_run_with_a_finite_loss_says_that_its_culprits_were_not_recorded() -> None:
    model = network()
    model.compile(LossScaleOptimizer(SGD(0.01), policy=Static(SCALE)), loss="mse")
    inputs, targets = six_batches()
    with pytest.raises(ScaleStuck, match="the step did not record which"):
        model.fit(
            inputs, np.full_like(targets, LARGE), verbose=0, callbacks=[ScaleMonitor(every=1, max_consecutive_skips=1)]
        )


def test_a_stuck_run_is_reported_once_where_it_shall_not_end() -> None:
    reports: list[ScaleStuck] = []
    watched(ScaleMonitor(every=1, max_consecutive_skips=3, on_stuck=reports.append), 0, 1, 2, 3, 4, 5, target=INF)
    assert [report.culprits for report in reports] == [[]]


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be between 1"):
        ScaleMonitor(max_consecutive_skips=0)


def test_a_record_has_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = ScaleMonitor(every=1, record=path)
    watched(monitor, 2, epochs=2)
    monitor._recorder.close()
    lines: list[Any] = [read_line(line) for line in path.read_bytes().splitlines()]
    header, *steps = lines
    assert isinstance(header, Header)
    assert header.saved().policy == POLICY
    assert [(step.step, step.scale, step.status == "applied") for step in steps] == [
        (before.step, before.scale, after.finite) for before, after in zip(monitor.rows, monitor.rows[1:], strict=False)
    ]
    assert all("loss" in step.note for step in steps)


def test_a_record_needs_a_reading_of_every_step() -> None:
    with pytest.raises(ValueError, match=r"`record` needs a reading of every step. Received: every=10. Pass `every=1`"):
        ScaleMonitor(record="run.jsonl")
