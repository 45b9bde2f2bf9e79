"""`watch`: records the tensors of a model at sampled steps, and costs nothing between them."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from gradscale.formats import Format
from gradscale.torch.drop_in.grad_scaler import GradScaler
from gradscale.torch.scaler import LossScaler
from gradscale.torch.watch.recorder import Recorder
from gradscale.watching.record import FORMATS, Ranges, Schedule, WatchRecord

Formats = Sequence[Format | str]


def watch(
    model: nn.Module,
    scaler: Any = None,
    layers: str = "",
    every: int = 100,
    steps: Ranges | None = None,
    *,
    formats: Formats = FORMATS,
) -> "Watch":
    """Records weights, inputs, outputs and gradients of every module at each `every`-th step, and returns the record.

        watched = watch(model, scaler, every=100)
        for x, y in loader:
            ...
            scaler.step(optimizer)
        print(watched.table())

    Hooks are registered for the sampled steps only, and removed after them: between samples there is nothing that
    could cost time. A sampled step synchronizes with the device. Gradients are recorded unscaled, with the scale that
    they had. The numbers of all micro-batches of a step are counted together, except those of `weight_grad`, which is
    their sum. Passes without gradients, as in validation, are left out.

    Args:
        model: the model. It must not be compiled, since compiled code runs no hooks that come later.
        scaler: a `LossScaler` counts its steps itself, skipped ones too. With a `GradScaler`, or None, call
            `watched.step()` after each step of the optimizer.
        layers: a regular expression; modules in whose name it is found are recorded. By default all.
        every: steps from one sample to the next, from step 0 on.
        steps: pairs of the first step and the one after the last; only steps in one of them are sampled.
        formats: what rows have losses of.

    Raises:
        TypeError: `scaler` has no scale.
        ValueError: the model is compiled, no name matches, or `every` or `steps` are not numbers of steps.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a module. Received: {type(model).__name__}.")
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch._dynamo.") or module._compiled_call_impl is not None:
            raise ValueError(
                "A compiled model runs no hooks that are registered later. Received: a model in which "
                f"{name or 'the model'} is compiled. Watch a short run without `torch.compile`."
            )
    if not any(re.search(layers, name) for name, _ in model.named_modules()):
        raise ValueError(f"`layers` must be found in the name of a module. Received: layers={layers!r}.")
    if scaler is not None and not isinstance(scaler, LossScaler) and not hasattr(scaler, "get_scale"):
        raise TypeError(
            "`scaler` must be a `LossScaler`, a `GradScaler` or None, since gradients are unscaled by it. "
            f"Received: {type(scaler).__name__}."
        )
    return Watch(model, scaler, layers, every, steps, formats)


class Watch(WatchRecord, AbstractContextManager["Watch"]):
    """What `watch` recorded, and its hooks. A context manager, which removes them at its end.

    Attributes:
        step_index: the step that comes next, or is running.
    """

    def __init__(
        self, model: nn.Module, scaler: Any, layers: str, every: int, steps: Ranges | None, formats: Formats
    ) -> None:
        super().__init__(every, steps, formats)
        self._scaler = scaler
        self._scale_read: tuple[Any, float] = None, 1.0
        self._begin = partial(Recorder, model, layers, self._scale)
        self._recorder = self._begin() if self.sampled else None
        if isinstance(scaler, LossScaler):
            scaler._memory.after_step.append(self._advance)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self) -> None:
        """Notes the end of a step. Call it once after each, where no `LossScaler` does.

        Raises:
            RuntimeError: a `LossScaler` counts the steps, and this one would be counted twice.
        """
        if isinstance(self._scaler, LossScaler):
            raise RuntimeError("The `LossScaler` given to `watch` counts the steps. Leave out `watched.step()`.")
        self._advance()

    def close(self) -> None:
        """Removes all hooks for good. A step that is not complete is not recorded."""
        self._schedule = Schedule(1, ())  # no step is sampled
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None
        if isinstance(self._scaler, LossScaler) and self._advance in self._scaler._memory.after_step:
            self._scaler._memory.after_step.remove(self._advance)

    def _advance(self) -> None:
        """Ends a step: removes the hooks of a sampled one, and registers those of the next if that is sampled."""
        if self._recorder is not None:
            sample = self._samples[self.step_index] = self._recorder.detach()
            if isinstance(self._scaler, LossScaler | GradScaler):
                self._scaler._memory.recorder.watch(self._scaler._rule.steps - 1, sample)
        self.step_index += 1
        self._recorder = self._begin() if self.sampled else None

    def _scale(self) -> float:
        if not isinstance(self._scaler, LossScaler):
            return 1.0 if self._scaler is None else float(self._scaler.get_scale())
        # The scale of a window is replaced, never changed. Once it was read, other gradients need not synchronize.
        scale = self._scaler.loss_scale
        if scale is not self._scale_read[0]:
            self._scale_read = scale, float(scale)
        return self._scale_read[1]
