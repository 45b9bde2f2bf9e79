"""Other systems' rules in the plainest form, to hold presets and imported states to: mutable counters, Python floats.

Each is a class with the system's own counters, a `scale`, and `step(overflow)`, which raises `Stopped` where the system
stops the run.
"""

from typing import Any

import numpy as np


class Stopped(Exception):
    """The system gave up: it cannot lower the scale any more."""


class DeepSpeed:
    """`DynamicLossScaler`; also the fused and unfused optimizers, with a `delayed_shift` of 1 and no error."""

    def __init__(self, init_scale: float, scale_window: int, min_scale: float, **hysteresis: Any) -> None:
        self.scale, self.window, self.lowest = init_scale, scale_window, min_scale
        self.patience = self.credits = hysteresis.get("delayed_shift", 1)
        self.consecutive = hysteresis.get("consecutive_hysteresis", False)
        self.raises = hysteresis.get("raise_error_at_min_scale", False)
        self.iteration, self.last_overflow = 0, -1

    def step(self, overflow: bool) -> None:
        if overflow:
            self._back_off()
            self.last_overflow = self.iteration
        else:
            stable = self.iteration - self.last_overflow - 1
            grows = stable > 0 and stable % self.window == 0
            if grows or self.consecutive:
                self.credits = self.patience
            self.scale *= 2.0 if grows else 1.0
        self.iteration += 1

    def _back_off(self) -> None:
        if self.credits > 1:
            self.credits -= 1
        elif self.raises and self.scale == self.lowest:
            raise Stopped
        else:
            self.scale = max(self.scale / 2.0, self.lowest)


class Fairseq:
    """`DynamicLossScaler` of fairseq."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.scale = config["init_scale"]
        self.iteration, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def step(self, overflow: bool) -> None:
        if overflow:
            self._overflow()
        elif (self.iteration - self.last_overflow) % self.config["scale_window"] == 0:
            self.scale *= self.config["scale_factor"]
            self.last_rescale = self.iteration
        self.iteration += 1

    def _overflow(self) -> None:
        before = self.scale
        self.overflows += 1
        self.last_overflow = self.iteration
        if self.overflows / ((self.iteration - self.last_rescale) or 1000) >= self.config["tolerance"]:
            self.scale /= self.config["scale_factor"]
            if self.config["threshold"] is not None:
                self.scale = max(self.scale, self.config["threshold"])
            self.last_rescale, self.overflows = self.iteration, 0
        if self.scale <= self.config["min_loss_scale"]:
            self.scale = before
            raise Stopped


class ApexAmp:
    """`amp.LossScaler` with a dynamic scale."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.scale, self.tracker = min(config["max_loss_scale"], config["init_scale"]), 0

    def step(self, overflow: bool) -> None:
        self.tracker = 0 if overflow else self.tracker + 1
        if overflow:
            self.scale = max(self.scale / 2, self.config["min_loss_scale"] or 0)
        elif self.tracker == self.config["scale_window"]:
            self.scale, self.tracker = min(self.scale * 2, self.config["max_loss_scale"]), 0


class ApexModulo:
    """`fp16_utils.DynamicLossScaler` and the contrib `FP16_Optimizer`."""

    def __init__(self, init_scale: float, scale_factor: float, scale_window: int) -> None:
        self.scale, self.factor, self.window = init_scale, scale_factor, scale_window
        self.iteration, self.last_overflow = 0, -1

    def step(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.last_overflow = max(self.scale / self.factor, 1), self.iteration
        elif (self.iteration - self.last_overflow) % self.window == 0:
            self.scale *= self.factor
        self.iteration += 1


class Float32Credits:
    """Megatron's `DynamicGradScaler`, and apex's hysteresis kernel where `kernel` is set."""

    def __init__(self, scale: float, config: dict[str, Any], *, kernel: bool) -> None:
        self.config, self.kernel = config, kernel
        self.scale, self.tracker, self.credits = np.float32(scale), 0, config["hysteresis"]

    def step(self, overflow: bool) -> None:
        self.tracker = 0 if overflow else self.tracker + 1
        if overflow:
            self.credits -= 1
            if self.credits <= 0:
                lowest = np.float32(self.config.get("min_scale", 0))
                self.scale = max(self._times(self.config["backoff_factor"]), lowest)
            return
        grows = self.tracker == self.config["growth_interval"]
        if grows or self.kernel:
            self.credits = self.config["hysteresis"]
        if grows:
            grown, self.tracker = self._times(self.config["growth_factor"]), 0
            self.scale = grown if np.isfinite(grown) or not self.kernel else self.scale

    @np.errstate(over="ignore")
    def _times(self, factor: float) -> np.float32:
        """Returns the product: in double precision in the kernel, between float32 tensors in Megatron."""
        return np.float32(float(self.scale) * factor) if self.kernel else self.scale * np.float32(factor)
