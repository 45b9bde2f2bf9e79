"""`install`: puts gradscale's scaler into a `Trainer`, and what that does differently then."""

from typing import Any

from transformers import Trainer

from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.integrations.accelerate import install as install_in
from gradscale.integrations.accelerate.accelerator import ScaledAccelerator
from gradscale.integrations.patching import mix_in
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies
from gradscale.torch import GradScaler


class ScaledTrainer(Trainer):
    """The methods that `install` puts before those of a trainer's own class.

    Attributes:
        accelerator: the trainer's, with a scaler installed.
    """

    accelerator: ScaledAccelerator
    _scaler_settings: dict[str, Any]

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, as for each trial of a search for hyperparameters, with a scaler of its own."""
        super().create_accelerator_and_postprocess()
        install_in(self.accelerator, **self._scaler_settings)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, and with the loss of training the metrics of the scaler."""
        if "loss" in logs:
            # In place: callers read what `Trainer.log` adds to their dict.
            logs.update(self.accelerator.scaler_metrics())
        super().log(logs, *args, **kwargs)


def install(
    trainer: Trainer,
    policy: Policy | str | None = None,
    *,
    retries: int = 0,
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
    on_stuck: OnStuck = "warn",
    record: Any = None,
    log: bool = True,
) -> GradScaler:
    """Makes `trainer` scale losses with `gradscale.torch.GradScaler`, which it returns.

        trainer = Trainer(model, TrainingArguments(fp16=True), train_dataset=dataset)
        scaler = install(trainer)
        trainer.train()

    Also for the trainers of TRL and other classes derived from `Trainer`. The learning rate schedule is held while
    steps are skipped, with fused optimizers too, and logs carry the metrics of the scaler. With `use_cpu=True`, where
    Transformers computes in float32 and scales nothing, the model runs under FP16 autocast. Checkpoints hold the
    scaler as before. All else is `gradscale.integrations.accelerate.install` on the trainer's accelerator.

    Args:
        trainer: built with `fp16=True`, and not trained or evaluated yet.
        policy: the rule for the scale, or its name; by default `"auto"`. With `CheckOnly()`, which scales nothing and
            skips steps that are not finite, the trainer may be one for BF16 or float32.
        retries: how often a backward pass that overflows is run again at a lower scale, without a second forward pass.
        max_consecutive_skips: as in `GradScaler`.
        on_stuck: as in `GradScaler`.
        record: what the run is recorded in, as in `gradscale.torch.GradScaler`.
        log: whether logs carry the metrics of the scaler.

    Raises:
        TypeError: `trainer` is not a `Trainer`.
        ValueError: it does not train in FP16 and `policy` scales, or DeepSpeed or another library scales its losses.
        RuntimeError: it has trained already, or `install` was called before.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"`install` takes a `transformers.Trainer`. Received: {type(trainer).__name__}. "
            "For an `Accelerator` use `gradscale.integrations.accelerate.install`."
        )
    if not trainer.args.fp16 and (policy is None or multiplies(as_policy(policy))):
        raise ValueError(
            "`install` needs a trainer that trains in FP16: `TrainingArguments(fp16=True)`. "
            f"Received: fp16={trainer.args.fp16!r}, bf16={trainer.args.bf16!r}, which need no loss scaling. To skip "
            "steps whose gradients are inf or NaN, pass `CheckOnly()`."
        )
    stuck = {"max_consecutive_skips": max_consecutive_skips, "on_stuck": on_stuck, "record": record}
    settings = {"policy": policy, "retries": retries, "log": log, **stuck}
    scaler = install_in(trainer.accelerator, **settings)
    mix_in(ScaledTrainer, trainer)
    trainer._scaler_settings = settings  # type: ignore[attr-defined]
    return scaler
