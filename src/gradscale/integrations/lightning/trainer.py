"""`MixedPrecision`: the precision plugin for `lightning.Trainer`."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn

from gradscale.integrations.lightning.overrides import clips_itself, overrides, reads_gradients
from gradscale.integrations.lightning.scaler import AUTO, AnyPrecision, is_unscaled, scaler_of
from gradscale.integrations.lightning.schedules import HeldSchedules, OnSkip, check_on_skip
from gradscale.integrations.logged import PREFIX, logged
from gradscale.policies.contract import Policy
from gradscale.torch import GradScaler, StepResult
from gradscale.torch.wrappers import own_module

Optimizer = torch.optim.Optimizer

HELD = "held_schedules"
"""Where a checkpoint says how often schedules must still be held; only there if they must."""

IN_PROGRESS_BAR = frozenset((f"{PREFIX}scale", f"{PREFIX}skipped"))


class MixedPrecision(LightningMixedPrecision):
    """FP16 mixed precision for `lightning.Trainer`, with the scaler of gradscale. `Fabric` has `FabricMixedPrecision`.

        trainer = Trainer(plugins=[MixedPrecision()])  # was: Trainer(precision="16-mixed")

    FP16 on a CPU is FP16. Clipping works with fused optimizers too, in their own kernels. A skipped step holds
    learning-rate schedules, and is shown in the progress bar, `trainer.callback_metrics` and the loggers.

    Args:
        policy: the rule for the scale, or its name.
        device: type of the device for `torch.autocast`; by default that of the Trainer's strategy.
        scaler: a `gradscale.torch.GradScaler`, for its other settings, instead of a `policy`.
        on_skip: `"hold"` holds schedules with `interval="step"` once for every skipped step; `"advance"` advances them,
            as Lightning's plugin does.
        log: log the scaler's metrics.
        precision: `"16-mixed"`, or `"bf16-mixed"` for a run in BF16, without a scaler.

    Attributes:
        scaler: the scaler; `scaler.last` is the result of the last step. None for BF16.
    """

    # The class must keep its name: the Trainer saves the plugin's state under it, also that of Lightning's own class.

    def __init__(
        self,
        policy: Policy | str = AUTO,
        *,
        device: str | None = None,
        scaler: GradScaler | None = None,
        on_skip: OnSkip = "hold",
        log: bool = True,
        precision: AnyPrecision = "16-mixed",
    ) -> None:
        super().__init__(precision, device or "cpu", scaler_of(policy, scaler, precision, device))
        self.scaler: GradScaler | None
        self._device_given = device is not None
        self._on_skip = check_on_skip(on_skip)
        self._logs = log
        self._schedules = HeldSchedules(())
        self._clip: dict[str, float] = {}
        self._clips_in_step = False

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepares a run: the Trainer's device, and the schedules."""
        module = own_module(model)
        if isinstance(module, LightningModule):
            if not self._device_given:
                self._use(module.trainer.strategy.root_device.type)
            self._schedules.detach()
            # In manual optimization the user advances them, and nothing would ask for the results.
            holds = self._on_skip == "hold" and self.scaler is not None and module.automatic_optimization
            self._schedules = HeldSchedules(lr_schedulers if holds else ())
            self._schedules.attach(module)
            if self.scaler is not None:
                self.scaler._discard()  # a step that an error has ended, in a run before
        return super().connect(model, optimizers, lr_schedulers)

    def _use(self, device: str) -> None:
        self.device = device
        if self.scaler is not None:
            self.scaler._device = device

    def teardown(self) -> None:
        """Ends a run."""
        self._schedules.detach()
        super().teardown()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Calls the hooks before the backward pass, with the loss as it is: `backward` scales it."""
        if not isinstance(module, LightningModule) or module._trainer is None:
            raise TypeError(
                "`MixedPrecision` is a plugin for `lightning.Trainer`. Received: a backward pass without one. "
                "For `lightning.Fabric` use `gradscale.integrations.lightning.FabricMixedPrecision`."
            )
        return Precision.pre_backward(self, tensor, module)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Scales the loss and runs the backward pass, by the module's own `backward` if it has one.

        Without, it is run again at a lower scale if it overflows before a step was applied.
        """
        if self.scaler is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        elif args or overrides(model, "backward", LightningModule):
            super().backward(self.scaler.scale(tensor), model, optimizer, *args, **kwargs)
        else:
            self.scaler.backward(tensor, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure, clips and steps the optimizer on unscaled gradients, or skips the step."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException("AMP and the LBFGS optimizer are not compatible.")
        returned = closure()
        # In automatic optimization `training_step` may return None: there was no backward pass.
        steps = returned is not None or not model.automatic_optimization
        if steps and reads_gradients(model):
            self._unscale(optimizer)
        # Without a step nothing is clipped: gradients that were unscaled would have to be stepped on.
        self._clip, self._clips_in_step = {}, not steps or not clips_itself(model)
        try:
            self._after_closure(model, optimizer)
        finally:
            self._clips_in_step = False
        if not steps:
            return returned
        clip = self._clip
        output = self.scaler.step(optimizer, **clip, **kwargs)  # type: ignore[arg-type]
        self.scaler.update()
        self._schedules.add(self.scaler.last)
        if self._logs:
            self._log(model, self.scaler.last)
        return output

    def _unscale(self, optimizer: Any) -> None:
        """Unscales the gradients, unless they are."""
        if self.scaler is not None and not is_unscaled(self.scaler, optimizer):
            self.scaler.unscale_(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips unscaled gradients: in the optimizer's step, or at once where the user's code may look at them."""
        if clip_val <= 0:
            return
        if self._clips_in_step:
            by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
            self._clip = {"clip_norm" if by_norm else "clip_value": float(clip_val)}
            return
        # In manual optimization called by the user, with the wrapper that the Trainer gives them.
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self._unscale(own)
        # Not Lightning's own `MixedPrecision`, which refuses fused optimizers.
        Precision.clip_gradients(self, own, clip_val, gradient_clip_algorithm)

    def _log(self, model: LightningModule, result: StepResult | None) -> None:
        """Logs the scaler's metrics as `self.log` does, if it is time to. Does not synchronize with the device."""
        # Not at every step: a call of `self.log` costs as much as a small optimizer's step.
        if self.scaler is not None and result is not None and _is_due(model.trainer, result):
            for name, value in logged(self.scaler.metrics()).items():
                model.log(name, value, prog_bar=name in IN_PROGRESS_BAR, on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scaler's state, and how often schedules must still be held if they must. Synchronizes."""
        state, held = super().state_dict(), self._schedules.state()
        return state | {HELD: held} if any(held) else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state, also one of Lightning's own plugin with torch's scaler."""
        state = dict(state_dict)
        self._schedules.load(state.pop(HELD, ()))
        super().load_state_dict(state)


def _is_due(trainer: Trainer, result: StepResult) -> bool:
    """Returns whether metrics are logged: after a skip, at the end of an epoch, and when what shows them is due."""
    if trainer.barebones:
        return False  # it refuses to log
    if trainer.is_last_batch or result.poll() is False:
        return True
    return trainer._logger_connector.should_update_logs and bool(trainer.loggers or trainer.progress_bar_callback)
