"""`FabricMixedPrecision`: the precision plugin for `lightning.Fabric`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor, nn

from gradscale.engine.decide import check_clip, check_retries
from gradscale.integrations.lightning.scaler import (
    AUTO,
    FP16,
    AnyPrecision,
    is_unscaled,
    policy_and_precision,
    scaler_of,
)
from gradscale.policies.contract import Policy
from gradscale.recording.loggers import logged
from gradscale.torch import GradScaler

Optimizer = torch.optim.Optimizer

KEY = "MixedPrecision"
"""Under which the scaler is saved: as in a checkpoint of `Trainer`."""

WITHOUT_SCALING = GradScaler("cpu", enabled=False)
"""Steps optimizers of a run in BF16: it clips, and does nothing else."""


class FabricMixedPrecision(LightningMixedPrecision):
    """FP16 mixed precision for `lightning.Fabric`, with the scaler of gradscale.

    What `MixedPrecision` is in a `Fabric`, with arguments for clipping.

        plugin = FabricMixedPrecision(clip_norm=1.0)
        fabric = Fabric(plugins=[plugin])  # was: Fabric(precision="16-mixed")

    FP16 on a CPU is FP16. `fabric.clip_gradients` works with fused optimizers; `clip_norm` here clips in the step, with
    one read of the gradients. `fabric.save` and `fabric.load` take the scaler along.

    Args:
        policy: the rule for the scale, or its name; or the `precision`, as in Lightning's own class.
        device: type of the device for `torch.autocast`; by default the CPU and the accelerator of the machine.
        scaler: a `gradscale.torch.GradScaler`, for settings such as `record`, instead of a `policy`. One of another
            class is used as Lightning's plugin does.
        clip_norm: bound on the norm of each optimizer's gradients, unscaled, at every step.
        clip_value: bound on the magnitude of every element, unscaled, at every step.
        retries: how often a backward pass that overflows is run again at a lower scale, without a second forward pass.
        precision: `"16-mixed"`, which is the default, or `"bf16-mixed"` for a run in BF16. That has a scaler with the
            policy `CheckOnly()` alone, which skips steps that are not finite.

    Attributes:
        scaler: the scaler; `scaler.last` is the result of the last step. None for BF16 without a policy.
    """

    def __init__(
        self,
        policy: Policy | str = AUTO,
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        retries: int = 0,
        precision: AnyPrecision | None = None,
    ) -> None:
        policy, precision = policy_and_precision(policy, precision)
        own = scaler_of(policy, scaler, precision, device)
        super().__init__(precision, device or "cpu", own if precision == FP16 else None)
        self.scaler: GradScaler | None = own
        check_retries(retries)
        self._retries = retries
        # Fabric does not tell its plugins where the model is.
        self._devices = _devices() if device is None else (device,)
        bounds = {"clip_norm": clip_norm, "clip_value": clip_value}
        for name, bound in bounds.items():
            check_clip(name, bound)
        self._clip = {name: bound for name, bound in bounds.items() if bound is not None}
        if self._clip and self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise TypeError(
                "`clip_norm` and `clip_value` need a `gradscale.torch.GradScaler`, which clips in its step. "
                f"Received: {type(self.scaler).__qualname__}. Pass one, or call `fabric.clip_gradients`."
            )
        carry_scalers()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations run in FP16, or BF16."""
        return super().forward_context() if len(self._devices) == 1 else self._on_all_devices()

    @contextmanager
    def _on_all_devices(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.autocast(device, dtype=self._desired_input_dtype))
            yield

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scales the loss and runs the backward pass."""
        if args or not isinstance(self.scaler, GradScaler):
            super().backward(tensor, model, *args, **kwargs)
        else:
            self.scaler.backward(tensor, **({"retries": self._retries} | kwargs))

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Clips and steps the optimizer on unscaled gradients, or skips the step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, **kwargs)
        scaler = WITHOUT_SCALING if self.scaler is None else self.scaler
        output = scaler.step(optimizer, **self._clip, **kwargs)  # type: ignore[arg-type]
        scaler.update()
        return output

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscales the gradients before `fabric.clip_gradients`, unless they are."""
        if not isinstance(self.scaler, GradScaler):
            super().unscale_gradients(optimizer)
        elif not is_unscaled(self.scaler, optimizer):
            self.scaler.unscale_(optimizer)

    def metrics(self) -> dict[str, float]:
        """Returns the scaler's metrics for `fabric.log_dict`. Never synchronizes."""
        if not isinstance(self.scaler, GradScaler) or not self.scaler.is_enabled():
            return {}
        return logged(self.scaler.metrics())


def _devices() -> tuple[str, ...]:
    """Returns the types of devices that a model may be on."""
    # A build for an accelerator names it on a machine that has none, too.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@cache
def carry_scalers() -> None:
    """Makes every `Fabric` with such a plugin save and load its scaler, and leaves others as they are.

    Done once. Fabric gives its plugins no part in a checkpoint, and no way to reach it.
    """
    save, load = Fabric.save, Fabric.load

    @wraps(save)
    def save_with_scaler(self: Fabric, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        plugin = self.strategy.precision
        # Empty for BF16 and a scaler that is disabled: there is nothing to save, as in a checkpoint of `Trainer`.
        if isinstance(plugin, FabricMixedPrecision) and not _holds(state, plugin) and (saved := plugin.state_dict()):
            state = state | {KEY: saved}
        save(self, path, state, *args, **kwargs)

    @wraps(load)
    def load_with_scaler(self: Fabric, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = load(self, path, state, *args, **kwargs)
        plugin = self.strategy.precision
        # Without a `state` nothing is restored, and all of the checkpoint is returned.
        if isinstance(plugin, FabricMixedPrecision) and state and KEY in remainder:
            plugin.load_state_dict(remainder.pop(KEY))
        return remainder

    Fabric.save, Fabric.load = save_with_scaler, load_with_scaler


def _holds(state: Mapping[str, Any], plugin: Any) -> bool:
    """Returns whether the user saves the scaler already, or something else under its name."""
    return KEY in state or any(value is plugin or value is plugin.scaler for value in state.values())
