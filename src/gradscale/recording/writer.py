"""The writer of a record: each step that the host knows of becomes a line of a file, and a row of loggers."""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Self

from gradscale._version import __version__
from gradscale.engine.measurement import UNKNOWN_RATIO
from gradscale.engine.metrics import host_metrics
from gradscale.engine.result import Status, StepResult
from gradscale.engine.saved import read_saved, write_saved
from gradscale.formats import BF16, FP16
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import CheckOnly
from gradscale.record import with_values
from gradscale.recording.form import Header, Step, Watched
from gradscale.recording.loggers import logged, logger_of
from gradscale.watching.rows import Sample

LOG = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Seconds that a line may stay in memory, and from one row of a logger to the next."""

START = b'{"gradscale":'
"""How a record begins."""

TAIL = 2**24
"""Bytes at the end of a record in which a torn last line is looked for: more than any line has."""

FAILED = "Training goes on without its record in %s: %s. This is logged once."

AT_EXIT = 0
"""Priority of what `multiprocessing` calls when a process ends; `atexit` is not called in those it has forked."""

Later = Callable[[], Mapping[str, Any] | None]


class RecordFile:
    """A record on disk: OSError or ValueError if it cannot be one. `resumed` is whether it has lines already.

    A thread appends lines, at most a second after they were added, and has the file open only while it does: a process
    that is killed leaves whole lines, but perhaps for the last.
    """

    def __init__(self, path: str) -> None:
        self._path, self._process, self._closed = path, os.getpid(), False
        self._lines: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            file.seek(0)
            head = file.read(len(START))
            if head != START[: len(head)]:
                raise ValueError(f"the file is no record, and begins with {head!r}")
            # The process that wrote it may have been killed while it wrote a line, or the disk have been full.
            start = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            self.resumed = file.truncate(start + file.read().rfind(b"\n") + 1) > 0
        Finalize(None, self.close, exitpriority=AT_EXIT)

    def add(self, line: str) -> None:
        """Adds a line, with its end."""
        self._lines.append(line)
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._flush_every_second, daemon=True)
            self._thread.start()

    def _flush_every_second(self) -> None:
        idle = False
        while not idle:
            time.sleep(FLUSH_S)
            if idle := not self._lines:
                self._thread = None  # first: a line that is added now is either written below, or starts another
            self.flush()

    def flush(self) -> None:
        """Writes what was added. Where that fails it is logged, and nothing is written from then on."""
        with self._writing:
            text = "".join(self._lines.popleft() for _ in range(len(self._lines)))
            # A process that was forked has a copy of the lines, which the first one writes.
            if text and os.getpid() == self._process:
                try:
                    with open(self._path, "ab") as file:
                        file.write(text.encode())
                except OSError as error:
                    self._process = -1
                    LOG.warning(FAILED, self._path, error)

    def close(self) -> None:
        """Writes what is left, when the process ends: a thread can no longer be started."""
        self._closed = True
        self.flush()


class RunRecorder:
    """Writes the steps of a run of a framework to `record`. A copy of it, and one with None, writes nothing.

    Attributes:
        on: whether anything is written.
        before_close: called when the process ends, so that a step whose numbers have arrived meanwhile is added.
    """

    def __init__(
        self, record: Any = None, framework: str = "", place: Callable[[], tuple[int, int]] = lambda: (0, 1)
    ) -> None:
        several: Any = record if isinstance(record, list | tuple) else [record]
        targets = [target for target in several if target is not None]
        self._paths = [os.path.abspath(target) for target in targets if isinstance(target, str | os.PathLike)]
        self._loggers = [logger_of(target) for target in targets if not isinstance(target, str | os.PathLike)]
        self._framework, self._place = framework, place
        self._files: list[RecordFile] | None = None
        self._began = self._timed = self._rowed = 0.0
        self._part: tuple[Any, ...] = ()
        self._last: tuple[Step, ScaleState] | None = None
        self._notes: dict[int, dict[str, Any]] = {}
        self._samples: dict[int, Sample] = {}
        self._late: list[tuple[Step, Later]] = []
        self.before_close: Callable[[], object] = lambda: None
        self.on = bool(targets)
        if self.on:
            known = weakref.ref(self)
            Finalize(None, lambda: (recorder := known()) and recorder.close(), exitpriority=AT_EXIT)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """A copy writes nothing: two runs would be mixed in one file."""
        return type(self), ()

    def note(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Notes numbers of the user for a step to come: plain ones, or copies on their way to the host."""
        if self.on:
            self._notes.setdefault(step, {}).update(numbers)

    def watch(self, step: int, sample: Sample) -> None:
        """Adds what was counted of tensors at a step, which was added, or will be."""
        if self._last is not None and self._last[0].step == step:
            self._write(replace(self._last[0], watch=_watched(sample)), self._last[1])
        elif self.on:
            self._samples[step] = sample

    def add_result(
        self, policy: Policy, before: ScaleState, after: ScaleState, result: StepResult, share: Any = None
    ) -> None:
        """Adds a step whose result is in host memory, as `add` does."""
        if self.on and result.attempted:
            numbers = {"norm": result.grad_norm, "amax": result.amax, "share": share}
            known = {name: float(number) for name, number in numbers.items() if number is not None}
            known |= {"retries": int(result.retries), "culprits": () if result.applied else result.culprits()}
            status = Status.of(bool(result.applied), bool(result.loss_finite))
            step = int(before.applied) + int(before.skipped)
            self.add(policy, before, after, {"step": step, "scale": float(result.scale), "status": status, **known})

    def add(
        self,
        policy: Policy,
        before: ScaleState,
        after: ScaleState,
        known: Mapping[str, Any],
        amax_ratio: Any = UNKNOWN_RATIO,
        later: Later = dict,
    ) -> None:
        """Adds a step, from what is `known` of its fields. Never synchronizes with a device.

        The state `before` it is the object that was `after` the last, unless somebody has changed it, and a new part
        begins; or the one `before` the last, which is then made again. `later` returns what more is known, or None as
        long as it is on its way.
        """
        if not self.on:
            return
        if not any(before is each for each in self._part[1:]) or policy is not self._part[0]:
            self._begin(policy, before, float(amax_ratio))
        self._part = policy, before, after
        number: int = known["step"]
        noted = self._notes.pop(number, {})
        if self._last is not None and self._last[0].step == number:
            noted = {**self._last[0].note, **noted}
        copies = {name: value for name, value in noted.items() if hasattr(value, "arrived")}

        def more() -> Mapping[str, Any] | None:
            if not all(copy.arrived for copy in copies.values()) or (found := later()) is None:
                return None
            return {**found, "note": noted | {name: copy.read()[0] for name, copy in copies.items()}}

        self._settle(number)
        if (sample := self._samples.pop(number, None)) is not None:
            known = {**known, "watch": _watched(sample)}
        found: Any = more()
        if found is None:
            found = {"note": {name: value for name, value in noted.items() if name not in copies}}
            self._late.append((Step(**known, **found), more))
        self._write(Step(**known, **found), after)

    def close(self) -> None:
        """Writes what is left, when the process ends."""
        self.before_close()
        self._settle()
        for file in self._files or ():
            file.flush()

    def _settle(self, made_again: int | None = None) -> None:
        """Writes steps anew of which more is known by now."""
        late, self._late = self._late, []
        for step, more in late:
            if (found := more()) is not None:
                self._write(replace(step, **found))
            elif step.step != made_again:
                self._late.append((step, more))

    def _begin(self, policy: Policy, state: ScaleState, amax_ratio: float) -> None:
        """Begins a part of the run: opens the files, if it is the first, and writes a header to them."""
        rank, ranks = self._place()
        if self._files is None:
            self._files, self._loggers = [], self._loggers if rank == 0 else []
            for path in [path for path in self._paths if rank == 0 or "{rank}" in path]:
                try:
                    self._files.append(RecordFile(path.replace("{rank}", str(rank))))
                except (OSError, ValueError) as error:
                    LOG.warning(FAILED, path, error)
            self.on = bool(self._files or self._loggers)
        self._began = self._timed = time.monotonic()
        for file in self._files:
            header = Header(
                gradscale=__version__,
                **write_saved(policy, state, amax_ratio),
                format=BF16.name if isinstance(policy, CheckOnly) else getattr(policy, "format", FP16).name,
                framework=self._framework,
                framework_version=version(self._framework),
                started=time.time(),
                rank=rank,
                ranks=ranks,
                resumed=file.resumed,
            )
            file.add(header.line())
            file.resumed = True

    def _write(self, step: Step, after: ScaleState | None = None) -> None:
        """Writes a line to the files, and a row to loggers if the state after the step is given."""
        now = time.monotonic()
        if now - self._timed >= FLUSH_S:
            step, self._timed = replace(step, seconds=now - self._began), now
        for file in self._files or ():
            file.add(step.line())
        if after is None:
            return
        self._last = step, after
        applied = step.status is Status.APPLIED
        if is_due := now - self._rowed >= FLUSH_S or not applied or bool(step.watch):
            self._rowed = now
        for logger in [logger for logger in self._loggers if logger.every or is_due]:
            try:
                # As in the metrics of a scaler, but for the scale, which is that of this step, and a norm of inf.
                metrics = host_metrics(after, step.norm if applied else None, step.amax)
                logger.write(logged(metrics | {"scale": float(step.scale)}), step)
            except Exception as error:  # whatever a logger raises
                self._loggers.remove(logger)
                LOG.warning(FAILED, logger.name, error, exc_info=True)


class Recorder:
    """Records the results of steps that are compiled functions, which the loop gives to it.

        recorder = Recorder("run.jsonl", scaler)
        for batch in batches:
            loss, scaler, params, result = step(scaler, params, batch)
            recorder.step(result, loss=loss)

    Args:
        record: the path of a file, a logger, or a list of them, as in `gradscale.recording`.
        scaler: the scaler, or the optimizer that has it, before the first step, or with a state that was loaded.
        rank: which process this is, such as `jax.process_index()`. That with rank 0 writes.
        ranks: how many processes there are.
    """

    def __init__(self, record: Any, scaler: Any, rank: int = 0, ranks: int = 1) -> None:
        self._policy, self._state, _ = read_saved(write_saved(scaler.policy, scaler.state))
        self._recorder = RunRecorder(record, type(scaler).__module__.split(".")[1], lambda: (rank, ranks))
        self._waiting: deque[tuple[StepResult, dict[str, Any]]] = deque()
        settle = weakref.WeakMethod(self._settle)
        self._recorder.before_close = lambda: (known := settle()) and known()

    def step(self, result: StepResult, **numbers: Any) -> None:
        """Records a step once its result is in host memory: an array of JAX is not waited for.

        Args:
            result: its result.
            **numbers: more of the same step, such as `loss=loss`: Python numbers, or arrays of one.
        """
        self._waiting.append((result, numbers))
        for value in filter(_is_late, _arrays(result, numbers)):
            value.copy_to_host_async()
        self._settle()

    def _settle(self) -> None:
        while self._waiting and not any(map(_is_late, _arrays(*self._waiting[0]))):
            result, numbers = self._waiting.popleft()
            if result.attempted:
                before, applied = self._state, bool(result.applied)
                counts = {"applied": before.applied + applied, "skipped": before.skipped + (not applied)}
                self._state = with_values(before, {"scale": float(result.next_scale), **counts})
                numbers = {name: float(number) for name, number in numbers.items()}
                self._recorder.note(int(before.applied) + int(before.skipped), numbers)
                self._recorder.add_result(self._policy, before, self._state, result)


def _arrays(result: StepResult, numbers: Mapping[str, Any]) -> list[Any]:
    known = result.applied, result.scale, result.next_scale, result.loss_finite, result.grad_norm, result.amax
    return [*known, *numbers.values()]


def _is_late(value: Any) -> bool:
    return hasattr(value, "is_ready") and not value.is_ready()


def _watched(sample: Sample) -> tuple[Watched, ...]:
    return tuple(Watched(*key, *tally) for key, tally in sample.items())
