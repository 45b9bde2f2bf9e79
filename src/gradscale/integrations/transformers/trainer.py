"""What a `Trainer` does differently once a scaler of gradscale is installed."""

from typing import Any

from transformers import Trainer

from gradscale.integrations.accelerate import install
from gradscale.integrations.accelerate.accelerator import ScaledAccelerator
from gradscale.integrations.patching import mix_in
from gradscale.torch import GradScaler


class ScaledTrainer(Trainer):
    """The methods that `install` puts before those of a trainer's own class.

    Attributes:
        accelerator: the trainer's, with a scaler installed.
    """

    accelerator: ScaledAccelerator
    _scaler_settings: dict[str, Any]

    @classmethod
    def take_over(cls, trainer: Any, settings: dict[str, Any]) -> GradScaler:
        """Puts these methods before those of the trainer's class, and returns the scaler of its accelerator.

        Args:
            trainer: the trainer.
            settings: arguments of Accelerate's `install`.
        """
        scaler = install(trainer.accelerator, **settings)
        mix_in(cls, trainer)
        trainer._scaler_settings = settings
        return scaler

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, as for each trial of a search for hyperparameters, with a scaler of its own."""
        super().create_accelerator_and_postprocess()
        install(self.accelerator, **self._scaler_settings)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, and with the loss of training the metrics of the scaler."""
        if "loss" in logs:
            # In place: callers read what `Trainer.log` adds to their dict.
            logs.update(self.accelerator.scaler_metrics())
        super().log(logs, *args, **kwargs)
