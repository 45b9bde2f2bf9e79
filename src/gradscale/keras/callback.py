"""`ScaleMonitor`: a callback that shows the scale and the skips of a `fit` while it runs, and records them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import keras

from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck, StuckCheck, Weights
from gradscale.engine.result import Status, StepResult
from gradscale.keras.optimizer import optimizer_of
from gradscale.keras.remember import weights_of
from gradscale.policies.checks import check_count
from gradscale.policies.contract import ScaleState
from gradscale.recording.writer import RunRecorder

LOGGED = ("scale", "skipped")
"""The metrics that the progress bar, the history and TensorBoard show, under the names of `optimizer.metrics()`."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One reading.

    Attributes:
        step: steps of the optimizer so far, applied or not. A resumed model continues the count.
        scale: the scale of the next step.
        skipped: how many of the steps were skipped.
        finite: whether none was skipped since the row before.
    """

    step: int
    scale: float
    skipped: int
    finite: bool


class ScaleMonitor(keras.callbacks.Callback):
    """Shows the scale and the skips of a run, and keeps a row of them every few batches.

        monitor = ScaleMonitor(every=1)
        model.fit(x, y, callbacks=[monitor])
        replay([Dynamic(), Dynamic(growth_interval=100)], found_inf=monitor.found_inf())

    `scale` and `skipped` are added to the logs, for the progress bar, the history and all later callbacks in the list,
    such as Keras's `TensorBoard` and `CSVLogger`. A batch shows the last reading.

    A reading synchronizes with the device, and on JAX makes Keras copy its whole state back into the model. Between
    readings nothing synchronizes.

    Attributes:
        rows: the readings, in order, of all calls of `fit`; one at the start and one at the end of every epoch.
    """

    async_safe = True
    """Keras may call `on_train_batch_end` from another thread: it does not synchronize with the device."""

    def __init__(
        self,
        every: int = 10,
        log_dir: str | PathLike[str] | None = None,
        *,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "raise",
        record: Any = None,
    ) -> None:
        """Makes a monitor for one model.

        Args:
            every: batches between two readings.
            log_dir: folder to write TensorBoard's files to, a point for each reading. Needs TensorFlow, on any
                backend of Keras.
            max_consecutive_skips: skipped steps in a row after which a reading finds the run stuck, if no lower scale
                is left to try or the loss that `fit` reports is not finite.
            on_stuck: `"raise"` a `ScaleStuck`; or, once until a step is applied, `"warn"` or call a function with the
                error; or `"ignore"` it.
            record: what the run is recorded in: the path of a file, a logger, or a list of them, as in
                `gradscale.recording`. Needs `every=1`, and `steps_per_execution=1` in the model.

        Raises:
            ImportError: `log_dir` was given, and there is no TensorFlow.
            TypeError: `every` or `max_consecutive_skips` is not an integer.
            ValueError: one of them is less than 1, `on_stuck` is none of its options, or `record` was given and `every`
                is not 1.
        """
        super().__init__()
        check_count("every", every)
        if record is not None and every != 1:
            raise ValueError(f"`record` needs a reading of every step. Received: every={every}. Pass `every=1`.")
        self._recorder = RunRecorder(record, "keras")
        self._state: ScaleState | None = None
        self.rows: list[ScaleRow] = []
        self._every = every
        self._stuck = StuckCheck(max_consecutive_skips, on_stuck)
        self._loss_finite, self._loss = True, math.nan
        self._weights: Weights | None = None
        self._batches = 0
        self._summary = None if log_dir is None else _Summary(fspath(log_dir))

    def found_inf(self) -> list[bool]:
        """Returns for each step whether it was skipped, for `gradscale.replay`.

        Raises:
            ValueError: more than one step lies between two readings, so that it is not known which was skipped.
        """
        pairs = list(zip(self.rows, self.rows[1:], strict=False))
        if far := [after.step - before.step for before, after in pairs if after.step > before.step + 1]:
            raise ValueError(
                "`found_inf` knows each step only if each was read. Received readings up to "
                f"{max(far)} steps apart. Use `ScaleMonitor(every=1)` and `steps_per_execution=1`."
            )
        return [not after.finite for before, after in pairs if after.step > before.step]

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the state and the size of the weights that the run starts from. Keras calls this.

        Raises:
            TypeError: the model was not compiled with gradscale's optimizer.
        """
        del logs
        self._batches = 0
        self._loss_finite = True
        state = self._read()
        if self._weights is None or not int(state.applied):
            self._weights = weights_of(self.model)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the state after the batches so far, every few batches. Keras calls this, always in the main thread.

        Raises:
            ScaleStuck: the run is stuck, and `on_stuck` is `"raise"`.
        """
        del batch, logs
        # Not in `on_train_batch_end`, which Keras may call from another thread while the next step runs.
        if self._batches and self._batches % self._every == 0:
            self._check_stuck(self._read())
        self._batches += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the last reading to the logs of a batch. Keras calls this, possibly in another thread."""
        del batch
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the state, and adds it to the logs of an epoch. Keras calls this.

        Raises:
            ScaleStuck: as above.
        """
        del epoch
        state = self._read()
        self._show(logs)
        self._check_stuck(state)

    def _read(self) -> ScaleState:
        optimizer = optimizer_of(self.model, "ScaleMonitor")
        state = optimizer.state
        skipped, step = int(state.skipped), int(state.applied) + int(state.skipped)
        if self.rows and step == self.rows[-1].step:  # nothing new, as at the start of a second `fit`
            return state
        finite = not self.rows or skipped == self.rows[-1].skipped
        before, self._state = self._state, state
        if before is not None and step == self.rows[-1].step + 1:
            self._recorder.note(step - 1, {"loss": self._loss})
            made = {"step": step - 1, "scale": before.scale, "status": Status.of(finite, self._loss_finite)}
            self._recorder.add(optimizer.policy, before, state, made)
        self.rows.append(ScaleRow(step, float(state.scale), skipped, finite))
        if self._summary is not None:
            self._summary.write(self.rows[-1])
        return state

    def _check_stuck(self, state: ScaleState) -> None:
        # `fit` keeps no result of a step, so this one has what the state knows: no culprits, no sizes.
        last = StepResult(applied=False, scale=state.scale, next_scale=state.scale, loss_finite=self._loss_finite)
        known = lambda: {"weights": weights_of(self.model, self._weights)}  # noqa: E731
        self._stuck.check(state, last, self._loss_finite, known)

    def _show(self, logs: dict[str, Any] | None) -> None:
        if logs is None:
            return
        # The optimizer keeps no loss. This is the mean over the epoch so far, which one bad batch makes non-finite
        # until the epoch ends.
        self._loss = float(logs.get("loss", 0.0))
        self._loss_finite = math.isfinite(self._loss)
        logs |= {name: getattr(self.rows[-1], name) for name in LOGGED}


class _Summary:
    """A folder of TensorBoard's, written with TensorFlow alone: `tf.summary.scalar` needs TensorBoard as well."""

    def __init__(self, log_dir: str) -> None:
        try:
            import tensorflow as tf
        except ImportError:
            raise ImportError(
                "`log_dir` needs TensorFlow, which writes TensorBoard's files on every backend of Keras. "
                f"Received: log_dir={log_dir!r}. Run: pip install tensorflow, or leave `log_dir` out."
            ) from None
        self._module: Any = tf.summary
        self._writer: Any = tf.summary.create_file_writer(log_dir)
        metadata = tf.compat.v1.SummaryMetadata
        self._scalar = metadata(plugin_data=metadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR")

    def write(self, row: ScaleRow) -> None:
        """Writes a point for each metric."""
        with self._writer.as_default(step=row.step):
            for name in LOGGED:
                self._module.write(name, float(getattr(row, name)), metadata=self._scalar)
        self._writer.flush()
