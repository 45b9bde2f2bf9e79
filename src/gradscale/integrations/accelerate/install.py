"""`install`: puts gradscale's scaler into an `Accelerator`."""

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import GradScalerKwargs

from gradscale.engine.decide import check_retries
from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.integrations.accelerate.accelerator import ScaledAccelerator
from gradscale.integrations.patching import mix_in
from gradscale.peers import preset
from gradscale.peers.specs import AUTO, as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import CheckOnly
from gradscale.torch import GradScaler, ShardedGradScaler

OWNERS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "torch_xla",
}
"""Backends that scale the loss by themselves."""

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def install(
    accelerator: Accelerator,
    policy: Policy | str | None = None,
    *,
    retries: int = 0,
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
    on_stuck: OnStuck = "warn",
    record: Any = None,
    log: bool = True,
) -> GradScaler:
    """Makes `accelerator` scale losses with `gradscale.torch.GradScaler`, which it returns.

        accelerator = Accelerator(mixed_precision="fp16")
        scaler = install(accelerator)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    The loop stays as it is. `backward`, `clip_grad_norm_`, `clip_grad_value_`, `save_state` and `load_state` use the
    scaler; `optimizer_step_was_skipped` and prepared schedulers know of skipped steps with fused optimizers, too, and
    `accelerator.log` adds the scaler's metrics. On a CPU, where Accelerate computes in float32 and scales nothing, the
    model runs under FP16 autocast.

    Reading whether a step was skipped synchronizes with the device, if the optimizer is fused; nothing else does.

    Args:
        accelerator: built with `mixed_precision="fp16"`. No optimizer is prepared with it yet.
        policy: the rule for the scale, or its name. By default the numbers of `GradScalerKwargs`, if the accelerator
            was built with them, and else `"auto"`. With `CheckOnly()`, which scales nothing and skips steps that are
            not finite, the accelerator may be one for BF16 or float32.
        retries: how often a backward pass that overflows is run again at a lower scale, without a second forward pass.
        max_consecutive_skips: as in `GradScaler`.
        on_stuck: as in `GradScaler`.
        record: what the run is recorded in, as in `gradscale.torch.GradScaler`.
        log: whether `accelerator.log` adds the metrics of the scaler. Switch it off for a tracker with fixed columns.

    Raises:
        TypeError: `accelerator` is not an `Accelerator`.
        ValueError: it does not train in FP16 and `policy` scales, another library scales its losses, or `policy` and
            `GradScalerKwargs` are two rules.
        RuntimeError: an optimizer is prepared already, or `install` was called before.
    """
    _check(accelerator, policy)
    check_retries(retries)
    settings = settings_of(policy, accelerator.scaler_handler)
    settings |= {"max_consecutive_skips": max_consecutive_skips, "on_stuck": on_stuck, "record": record}
    scaler = _class_for(accelerator)(accelerator.device.type, **settings)
    accelerator.scaler = scaler
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        accelerator.native_amp = True
        _autocast_prepared(accelerator)
    # Not a subclass for users to build: trainers on top of Accelerate build theirs themselves.
    mix_in(ScaledAccelerator, accelerator)
    accelerator._retries, accelerator._logs = retries, log  # type: ignore[attr-defined]
    return scaler


def _check(accelerator: Accelerator, policy: Policy | str | None) -> None:
    """Raises unless the losses of `accelerator` can be scaled here, and all its optimizers will know."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"`install` takes an `accelerate.Accelerator`. Received: {type(accelerator).__name__}. "
            "For a `Trainer` use `gradscale.integrations.transformers.install`."
        )
    if isinstance(accelerator, ScaledAccelerator):
        raise RuntimeError("`install` was called on this accelerator before. Its scaler is `accelerator.scaler`.")
    if accelerator.distributed_type in OWNERS:
        raise ValueError(
            "`install` scales losses of plain, DDP and FSDP training. "
            f"Received: an accelerator of {OWNERS[accelerator.distributed_type]}, which has a scaler of its own."
        )
    if accelerator.mixed_precision != "fp16" and not _only_checks(accelerator, policy):
        raise ValueError(
            '`install` needs an accelerator that trains in FP16: `Accelerator(mixed_precision="fp16")`. '
            f"Received: mixed_precision={accelerator.mixed_precision!r}, which needs no loss scaling. To skip steps "
            'whose gradients are inf or NaN in "bf16" or "no", pass `CheckOnly()`.'
        )
    if accelerator._optimizers:
        raise RuntimeError(
            "`install` must come before `accelerator.prepare`: an optimizer keeps the scaler it was prepared with. "
            f"Prepared already: {', '.join(type(each.optimizer).__name__ for each in accelerator._optimizers)}."
        )


def _only_checks(accelerator: Accelerator, policy: Policy | str | None) -> bool:
    """Returns whether nothing is scaled, in a precision whose range is that of float32."""
    wide = accelerator.mixed_precision in ("bf16", "no")
    return wide and policy is not None and isinstance(as_policy(policy), CheckOnly)


def _class_for(accelerator: Accelerator) -> type[GradScaler]:
    """Returns the scaler for how the model is spread: the shards of FSDP1 are plain tensors."""
    fsdp1 = accelerator.distributed_type is DistributedType.FSDP and not getattr(accelerator, "is_fsdp2", False)
    return ShardedGradScaler if fsdp1 else GradScaler


def _autocast_prepared(accelerator: Accelerator) -> None:
    """Lets models that were prepared already, such as the reference model of TRL, run under autocast as well."""
    # `prepare_model` puts autocast around `forward`, if `native_amp` is set by then, of models it has not marked.
    models: list[torch.nn.Module] = accelerator._models
    accelerator._models = []
    for model in models:
        model._is_accelerate_prepared = False  # type: ignore[assignment]
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def settings_of(policy: Policy | str | None, given: GradScalerKwargs | None) -> dict[str, Any]:
    """Returns the arguments of `GradScaler` that are its rule.

    Args:
        policy: what `install` was called with; None if nothing.
        given: what the accelerator was built with; None if nothing.

    Raises:
        ValueError: both are given, and are two rules.
    """
    if given is None:
        return {"policy": AUTO if policy is None else policy}
    numbers = {name: getattr(given, name) for name in (*NUMBERS, "enabled")}
    if policy is None:
        return numbers
    chosen = as_policy(policy)
    if not _agree(chosen, numbers):
        raise ValueError(
            "`policy` and the `GradScalerKwargs` of the accelerator are two rules for one scale. "
            f"Received: policy={chosen!r} and {given!r}. Give one of them."
        )
    return {"policy": chosen}


def _agree(policy: Policy, numbers: dict[str, Any]) -> bool:
    """Returns whether `policy` says the same as the numbers; it may say more, such as bounds."""
    if not numbers["enabled"]:
        return not policy.needs
    rule = {name: numbers[name] for name in NUMBERS}
    if isinstance(policy, Dynamic):
        return all(getattr(policy, name) == value for name, value in rule.items())
    return policy == preset("torch", **rule)
