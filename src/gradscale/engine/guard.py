"""Learning-rate schedules and averaged weights that take a skipped step into account."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from gradscale.engine.result import StepResult

OnSkip = Literal["hold", "advance"]


class Guard:
    """Steps schedulers and averages together with the scaler, holding or advancing them when a step was skipped.

    Made by `LossScaler.guard`. Schedulers are in host memory, so that holding one needs the outcome there: `step`
    synchronizes with the device. Advancing does not.
    """

    def __init__(self, latest: Callable[[], StepResult | None], targets: tuple[Any, ...], on_skip: OnSkip) -> None:
        if on_skip not in ("hold", "advance"):
            raise ValueError(f"`on_skip` must be 'hold' or 'advance'. Received: on_skip={on_skip!r}.")
        self._latest = latest
        self._calls = [_update_of(target) for target in targets]
        self._on_skip = on_skip
        self._handled: StepResult | None = None

    def step(self) -> bool:
        """Advances every guarded object, or none if the step was skipped and `on_skip` is "hold"; returns whether.

        Once per step of the scaler: called again before the next one, as between micro-batches, it does nothing.

        Raises:
            RuntimeError: the scaler has not made a step yet.
        """
        result = self._latest()
        if result is None:
            raise RuntimeError("`guard.step()` follows `scaler.step(...)`. No step has been made yet.")
        if result is self._handled:
            return False
        # First, so that a scheduler that raises is not advanced a second time for the same step.
        self._handled = result
        if self._on_skip == "hold" and result.skipped():
            return False
        for call in self._calls:
            call()
        return True


def _update_of(target: Any) -> Callable[[], Any]:
    """Returns what advances `target`: its `step`, its `update`, or the callable itself."""
    # `update_parameters` of torch's `AveragedModel` takes the model; `ReduceLROnPlateau.step` takes a metric.
    methods = [getattr(target, name, None) for name in ("step", "update")]
    found = next((method for method in methods if callable(method)), target)
    if not callable(found) or hasattr(target, "update_parameters") or _wants_arguments(found):
        raise TypeError(
            "`guard` takes schedulers (with a `step`), averages (with an `update`) and functions, all of which it "
            f"calls without arguments. Received: {type(target).__name__}. Pass a function that gives them, such as "
            "`lambda: ema.update_parameters(model)` or `lambda: scheduler.step(metric)`."
        )
    return found


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False
