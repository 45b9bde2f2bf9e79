"""`MixedPrecision`: the precision plugin for `lightning.Trainer`, which works in a `lightning.Fabric` too."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from gradscale.integrations.lightning.fabric import FabricMixedPrecision
from gradscale.integrations.lightning.scaler import AUTO, AnyPrecision
from gradscale.integrations.lightning.schedules import HeldSchedules, OnSkip, check_on_skip
from gradscale.policies.contract import Policy
from gradscale.recording.loggers import GRAD_NORM, PREFIX, logged
from gradscale.torch import GradScaler
from gradscale.torch.wrappers import own_module

Optimizer = torch.optim.Optimizer

HELD = "held_schedules"
"""Where a checkpoint says how often schedules must still be held; only there if they must."""

IN_PROGRESS_BAR = frozenset((f"{PREFIX}scale", f"{PREFIX}skipped"))

TORCHS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)

CLIPPING_OF_PLUGIN = ("_after_closure", "_clip_gradients", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
"""Methods of a plugin that clip, the outermost first."""


class MixedPrecision(LightningMixedPrecision, FabricMixedPrecision):
    """FP16 mixed precision for `lightning.Trainer` and `lightning.Fabric`, with the scaler of gradscale.

        trainer = Trainer(plugins=[MixedPrecision()])  # was: Trainer(precision="16-mixed")
        fabric = Fabric(plugins=[MixedPrecision()])  # was: Fabric(precision="16-mixed")

    FP16 on a CPU is FP16. Clipping works with fused optimizers too, in their own kernels. A skipped step holds
    learning-rate schedules, and is shown in the progress bar, `trainer.callback_metrics` and the loggers. In a `Fabric`
    it is a `FabricMixedPrecision`, whose arguments for clipping it has not.

    Args:
        policy: the rule for the scale, or its name; or the `precision`, as in Lightning's own class.
        device: type of the device for `torch.autocast`; by default that of the Trainer's strategy.
        scaler: a `gradscale.torch.GradScaler`, for settings such as `record`, instead of a `policy`. One of another
            class is used as Lightning's plugin does.
        on_skip: `"hold"` holds schedules with `interval="step"` once for every skipped step; `"advance"` advances them,
            as Lightning's plugin does.
        log: log the scaler's metrics.
        retries: how often a backward pass that overflows is run again at a lower scale, without a second forward pass.
        precision: `"16-mixed"`, which is the default, or `"bf16-mixed"` for a run in BF16. That has a scaler with the
            policy `CheckOnly()` alone, which skips steps that are not finite.

    Attributes:
        scaler: the scaler; `scaler.last` is the result of the last step. None for BF16 without a policy.
    """

    # The class must keep its name: the Trainer saves the plugin's state under it, also that of Lightning's own class.

    def __init__(
        self,
        policy: Policy | str = AUTO,
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        on_skip: OnSkip = "hold",
        log: bool = True,
        retries: int = 0,
        precision: AnyPrecision | None = None,
    ) -> None:
        FabricMixedPrecision.__init__(self, policy, device, scaler, retries=retries, precision=precision)
        self._device_given = device is not None
        self._on_skip = check_on_skip(on_skip)
        self._logs = log
        self._schedules = HeldSchedules(())
        self._clip_in_step: dict[str, float] | None = None
        self._clip_replaced = False
        self._in_trainer = False  # until a Trainer connects it

    @property
    def _own(self) -> GradScaler | None:
        """The scaler, if it is one of gradscale: with any other the plugin does what Lightning's own does."""
        return self.scaler if isinstance(self.scaler, GradScaler) else None

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepares a run: the Trainer's device, and the schedules."""
        module, scaler = own_module(model), self._own
        if isinstance(module, LightningModule):
            self._in_trainer = True
            self._clip_replaced = replaces_clipping(self, MixedPrecision)
            if not self._device_given:
                self.device = module.trainer.strategy.root_device.type
                if scaler is not None:
                    scaler._device = self.device
            self._schedules.detach()
            # In manual optimization the user advances them, and nothing would ask for the results.
            holds = self._on_skip == "hold" and scaler is not None and module.automatic_optimization
            self._schedules = HeldSchedules(lr_schedulers if holds else ())
            self._schedules.attach(module)
            if scaler is not None:
                scaler._discard()  # a step that an error has ended, in a run before
        return super().connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        """Ends a run."""
        self._in_trainer = False
        self._schedules.detach()
        super().teardown()

    def forward_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Returns a context in which operations run in FP16, or BF16."""
        # Lightning decides about autocast's cache: 2.6 turns it off, later releases do not.
        # A `Fabric` does not say on which device it is.
        of = LightningMixedPrecision if self._in_trainer else FabricMixedPrecision
        return of.forward_context(self)

    def convert_input(self, data: Any) -> Any:
        """Returns a batch as it is; in a `Fabric`, where models take FP16, in FP16."""
        return data if self._in_trainer else super().convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Returns what a model returned as it is; in a `Fabric` in float32."""
        return data if self._in_trainer else super().convert_output(data)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Calls the hooks before the backward pass, with the loss as it is: `backward` scales it."""
        if not self._in_trainer:
            return tensor
        if self._own is None:
            return super().pre_backward(tensor, module)
        return Precision.pre_backward(self, tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Scales the loss and runs the backward pass, by the module's own `backward` if it has one."""
        if not self._in_trainer:
            FabricMixedPrecision.backward(self, tensor, model, *args, **kwargs)
            return
        optimizer, *others = args
        scaler = self._own
        if scaler is not None and not others and not is_overridden("backward", model, LightningModule):
            scaler.backward(tensor, **({"retries": self._retries} | kwargs))
            return
        if scaler is not None and self._retries:
            raise MisconfigurationException(
                "`retries` runs the backward pass itself, again if it overflows. Received: "
                f"retries={self._retries!r} and a module with its own `backward`, or a backward pass with "
                "arguments by position. Leave `retries` out, or the method."
            )
        loss = tensor if scaler is None else scaler.scale(tensor)
        super().backward(loss, model, optimizer, *others, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Calls the hooks after the backward pass."""
        return super().post_backward(tensor, module) if self._in_trainer else tensor

    def optimizer_step(self, optimizer: Optimizable, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the closure, clips and steps the optimizer on unscaled gradients, or skips the step."""
        if not self._in_trainer:
            return FabricMixedPrecision.optimizer_step(self, optimizer, *args, **kwargs)
        if (scaler := self._own) is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        return self._step(scaler, optimizer, *args, **kwargs)

    def _step(
        self,
        scaler: GradScaler,
        optimizer: Optimizable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException("AMP and the LBFGS optimizer are not compatible.")
        returned = closure()
        # In automatic optimization `training_step` may return None: there was no backward pass.
        steps = returned is not None or not model.automatic_optimization
        clips = self._clip_replaced or clips_itself(model)
        if steps and (clips or looks_before_step(model)):
            self.unscale_gradients(optimizer)  # type: ignore[arg-type]
        # Without a step nothing is clipped: gradients that were unscaled would have to be stepped on.
        self._clip_in_step = None if steps and clips else {}
        try:
            self._after_closure(model, optimizer)
        finally:
            clip, self._clip_in_step = self._clip_in_step or {}, None
        if not steps:
            return returned
        output = scaler.step(optimizer, **clip, **kwargs)  # type: ignore[arg-type]
        scaler.update()
        self._schedules.add(scaler.last)
        if self._logs:
            self._log(model, scaler, optimizer)
        return output

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips unscaled gradients: in the optimizer's step, or at once where the user's code may look at them."""
        if clip_val <= 0:
            return
        if self._clip_in_step is not None:
            by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
            self._clip_in_step = {"clip_norm" if by_norm else "clip_value": float(clip_val)}
            return
        if self.scaler is not None and self._own is None:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        # In manual optimization called by the user, with the wrapper that the Trainer gives them.
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self.unscale_gradients(own)
        # Not Lightning's own `MixedPrecision`, which refuses fused optimizers.
        Precision.clip_gradients(self, own, clip_val, gradient_clip_algorithm)

    def _log(self, model: LightningModule, scaler: GradScaler, optimizer: Optimizable) -> None:
        """Logs the scaler's metrics as `self.log` does, if it is time to. Does not synchronize with the device."""
        result, trainer = scaler.last, model.trainer
        if result is None or trainer.barebones:  # which refuses to log
            return
        skipped = result.poll() is False
        # Not at every step: where nothing has measured the norm, it takes one more read of the gradients.
        if trainer.is_last_batch or skipped or trainer._logger_connector.should_update_logs:
            metrics: dict[str, Any] = logged(scaler.metrics())
            if GRAD_NORM not in metrics and not skipped and (norm := norm_after_step(optimizer)) is not None:
                metrics[GRAD_NORM] = norm
            for name, value in metrics.items():
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


def looks_before_step(model: LightningModule) -> bool:
    """Returns whether the module or a callback has the hook before the optimizer's step."""
    hook = "on_before_optimizer_step"
    return is_overridden(hook, model, LightningModule) or any(
        is_overridden(hook, callback, Callback)
        for callback in model.trainer.callbacks  # type: ignore[attr-defined]
    )


def clips_itself(model: LightningModule) -> bool:
    """Returns whether the module clips in its own way, and may look at gradients that are clipped."""
    return any(
        is_overridden(method, model, LightningModule) for method in ("configure_gradient_clipping", "clip_gradients")
    )


def replaces_clipping(plugin: Precision, parent: type[Precision]) -> bool:
    """Returns whether gradients are clipped by a function of the user's, which must then be called.

    It may be a method of a class derived from `parent`, or stand in for torch's function, as one that records norms.
    """
    return (
        any(is_overridden(method, plugin, parent) for method in CLIPPING_OF_PLUGIN)
        or (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) != TORCHS
    )


def norm_after_step(optimizer: Optimizable) -> Tensor | None:
    """Returns the norm of the gradients that a step has just been made on, unscaled. Does not synchronize.

    None without gradients, and where ranks hold shards of them: not every rank may log. One read of the gradients.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    plain = all(type(grad) is Tensor and grad.layout is torch.strided for grad in grads)
    return torch.nn.utils.get_total_norm(grads) if grads and plain else None
