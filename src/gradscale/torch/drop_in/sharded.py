"""`ShardedGradScaler`: a drop-in for the scaler that torch has for FSDP1."""

from typing import Any, ClassVar

from gradscale.engine.other_arguments import explains_arguments
from gradscale.engine.stuck import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.policies.contract import Policy
from gradscale.torch.drop_in.grad_scaler import GradScaler
from gradscale.torch.drop_in.ranks import Ranks


class ShardedGradScaler(GradScaler):
    """A drop-in for `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`: change the import, keep the loop.

    For FSDP1, whose shards are plain tensors: all ranks of a process group decide together, in one small round for each
    optimizer and step. With torch's class they do not if the optimizer is fused. FP16 gradients are unscaled, as by
    torch's class, and everything else is as in `GradScaler`. FSDP2 (`fully_shard`) needs no class of its own.

    Args:
        device: type of the device.
        init_scale: scale of the first step.
        backoff_factor: factor by which the scale is multiplied when it backs off. It comes before `growth_factor`, as
            in torch's class.
        growth_factor: factor by which the scale is multiplied when it grows.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False makes every method do nothing, and `step` just call the optimizer's.
        process_group: the ranks that decide together; by default every rank.
        policy: as in `GradScaler`, and so are the others.
        min_scale: lowest scale.
        max_scale: highest scale.
        hysteresis: overflows before the scale backs off for the first time.
        max_consecutive_skips: skipped steps in a row before the run is stuck.
        on_stuck: what to do then.

    Attributes:
        process_group: as the argument; not there when disabled, as in torch's class.
    """

    _unscales_half: ClassVar[bool] = True

    @explains_arguments("ShardedGradScaler")
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        *,
        policy: Policy | str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "warn",
    ) -> None:
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            policy=policy,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            max_consecutive_skips=max_consecutive_skips,
            on_stuck=on_stuck,
            group=process_group,
        )
        self._ranks = Ranks(process_group, always=True)
        if self._enabled:
            self.process_group = process_group
