"""Training loops that belong to a library, run one step at a time, so that they can take turns."""

from collections.abc import Callable
from threading import Semaphore, Thread

from benchmarks.turns import Side

Pause = Callable[[], None]


class Stepwise:
    """A training loop in a thread of its own, which waits for its turn before each step.

    Whole runs of seconds that take turns differ by what else a machine does in these seconds, and by more than a scaler
    costs. Single steps do not.

    Args:
        train: runs the loop, and calls its argument at the beginning of each step.
    """

    def __init__(self, train: Callable[[Pause], object]) -> None:
        self._train = train
        self._resumed, self._paused = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        # A daemon: it never ends by itself, and may still be waiting when the program ends.
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def side(self) -> Side:
        """The loop as a side of a comparison: a turn is one step, from its beginning to that of the next."""
        return Side(self.step)

    def step(self) -> None:
        """Runs the loop from the beginning of a step to that of the next. Raises what it raises."""
        self._resumed.release()
        self._wait()

    def _wait(self) -> None:
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def _pause(self) -> None:
        self._paused.release()
        self._resumed.acquire()

    def _run(self) -> None:
        try:
            self._train(self._pause)
            raise RuntimeError("The training loop has ended, and more steps were asked for.")
        except BaseException as error:
            self._error = error
        self._paused.release()
