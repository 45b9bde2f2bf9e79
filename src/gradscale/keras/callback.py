"""`ScaleMonitor`: a callback that shows the scale and the skips of a `fit` while it runs, and records them."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import keras

from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, ScaleStuck
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.policies.checks import check_count
from gradscale.policies.contract import ScaleState

SHOWN = ("loss_scale", "skipped_steps")
"""What the progress bar, the history and TensorBoard call the scale and the count of skips."""

CAUSE = (
    "`fit` does not tell which gradients were not finite, nor whether the loss was; look at the loss first, then at "
    "the culprits of a step in a loop of your own."
)
"""What is known of a stuck run here, as a sentence."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """What a reading found.

    Attributes:
        step: steps that the optimizer has taken so far, applied or not. It counts on where a saved model is resumed.
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

    `loss_scale` and `skipped_steps` are added to the logs, where the progress bar, the history and all callbacks that
    stand later in the list find them, such as Keras' `TensorBoard` and `CSVLogger`. A batch shows what was last read.

    A reading waits for the device, and on JAX makes Keras take its whole state back into the model. Between readings
    nothing waits, and Keras goes on showing its progress from another thread.

    Attributes:
        rows: what was read, in order, through all calls of `fit`; one row at the begin and at every end of an epoch.
    """

    async_safe = True
    """Tells Keras that `on_train_batch_end` may be called from another thread: it reads no device."""

    def __init__(
        self,
        every: int = 10,
        log_dir: str | PathLike[str] | None = None,
        *,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
    ) -> None:
        """Makes a monitor for one model.

        Args:
            every: batches between two readings.
            log_dir: folder to write TensorBoard's files to, a point for each reading. Needs TensorFlow, on whichever
                backend Keras runs.
            max_consecutive_skips: skipped steps in a row, with no lower scale left to try, after which a reading raises
                `ScaleStuck`.

        Raises:
            ImportError: `log_dir` was given, and there is no TensorFlow.
            TypeError: `every` or `max_consecutive_skips` is no integer.
            ValueError: one of them is less than 1.
        """
        super().__init__()
        check_count("every", every)
        check_count("max_consecutive_skips", max_consecutive_skips)
        self.rows: list[ScaleRow] = []
        self._every = every
        self._max_consecutive_skips = max_consecutive_skips
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
        """Reads where the run starts. Keras calls this.

        Raises:
            TypeError: the model was not compiled with gradscale's optimizer.
        """
        del logs
        self._batches = 0
        self._read()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reads what the batches so far have done, if it is time. Keras calls this, always in the main thread.

        Raises:
            ScaleStuck: step after step was skipped, and no lower scale is left to try.
        """
        del batch, logs
        if self._batches and self._batches % self._every == 0:
            self._check_stuck(self._read())
        self._batches += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds what was last read to the logs of a batch. Keras calls this, possibly in another thread."""
        del batch
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads, and adds it to the logs of an epoch. Keras calls this.

        Raises:
            ScaleStuck: as above.
        """
        del epoch
        state = self._read()
        self._show(logs)
        self._check_stuck(state)

    def _read(self) -> ScaleState:
        state = _optimizer_of(self.model).state
        skipped, step = int(state.skipped), int(state.applied) + int(state.skipped)
        if self.rows and step == self.rows[-1].step:
            return state
        finite = not self.rows or skipped == self.rows[-1].skipped
        self.rows.append(ScaleRow(step, float(state.scale), skipped, finite))
        if self._summary is not None:
            self._summary.write(self.rows[-1])
        return state

    def _check_stuck(self, state: ScaleState) -> None:
        skips = int(state.consecutive_skips)
        if state.stuck and skips >= self._max_consecutive_skips:
            raise ScaleStuck(skips, float(state.scale), (), CAUSE)

    def _show(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            logs |= zip(SHOWN, (self.rows[-1].scale, self.rows[-1].skipped), strict=True)


class _Summary:
    """A folder of TensorBoard's, written with TensorFlow alone: `tf.summary.scalar` wants TensorBoard as well."""

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
        """Writes a point for each thing that is shown."""
        with self._writer.as_default(step=row.step):
            for name, value in zip(SHOWN, (row.scale, float(row.skipped)), strict=True):
                self._module.write(name, value, metadata=self._scalar)
        self._writer.flush()


def _optimizer_of(model: Any) -> LossScaleOptimizer:
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            "`ScaleMonitor` reads a `gradscale.keras.LossScaleOptimizer`. "
            f"Received a model compiled with {type(optimizer).__module__}.{type(optimizer).__name__}. "
            "Compile the model with one; where Keras has put its own there, `gradscale.keras.adopt(model)` replaces it."
        )
    return optimizer
