"""`ShardedGradScaler`: a drop-in for the scaler that torch has for FSDP1."""

from typing import Any, ClassVar

from gradscale.engine.health import MAX_CONSECUTIVE_SKIPS, OnStuck
from gradscale.engine.hints import explains_arguments
from gradscale.policies.contract import Policy
from gradscale.torch.drop_in.grad_scaler import GradScaler


class ShardedGradScaler(GradScaler):
    """A drop-in for `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`: change the import, keep the loop.

    For FSDP1, whose shards are plain tensors: all ranks of a process group decide together, in one small round for each
    optimizer and step. With torch's class they do not if the optimizer is fused. FP16 gradients are unscaled, as by
    torch's class, and everything else is as in `GradScaler`. FSDP2 (`fully_shard`) needs no class of its own.

    Arguments are those of `GradScaler`, but for `group`. By position `backoff_factor` comes before `growth_factor`, and
    `process_group` after `enabled`, as in torch's class.

    Args:
        process_group: the ranks that decide together; by default every rank.

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
        record: Any = None,
    ) -> None:
        numbers = init_scale, growth_factor, backoff_factor, growth_interval
        bounds: dict[str, Any] = {"min_scale": min_scale, "max_scale": max_scale, "hysteresis": hysteresis}
        stuck: dict[str, Any] = {"max_consecutive_skips": max_consecutive_skips, "on_stuck": on_stuck, "record": record}
        super().__init__(device, *numbers, enabled, policy=policy, **bounds, **stuck, group=process_group)
        self._always_agrees = True
        if self._enabled:
            self.process_group = process_group
