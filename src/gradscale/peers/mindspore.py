"""MindSpore: the update cells, `amp.DynamicLossScaler`, and the managers of `mindspore.train`."""

import numpy as np

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer
from gradscale.policy import Static


def dynamic_update_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> Ladder:
    """Returns the rule of `nn.DynamicLossScaleUpdateCell`: float32, floor 1, times the float32 reciprocal to back off."""
    return Ladder(
        init_scale=loss_scale_value,
        growth_factor=scale_factor,
        backoff_factor=float(np.float32(1) / np.float32(scale_factor)),
        growth_interval=scale_window,
        overshoot=True,
        floor=1.0,
    )


def dynamic_loss_scaler(scale_value: float, scale_factor: int, scale_window: int) -> Ladder:
    """Returns the rule of `amp.DynamicLossScaler`: float32, floor 1, never grown to infinity."""
    return Ladder(
        init_scale=scale_value,
        growth_factor=scale_factor,
        backoff_factor=1.0,
        backoff_divisor=scale_factor,
        growth_interval=scale_window,
        floor=1.0,
        refuses_inf=True,
    )


def dynamic_manager(init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000) -> Ladder:
    """Returns the rule of `DynamicLossScaleManager` on the host."""
    return Ladder(
        init_scale=init_loss_scale,
        growth_factor=scale_factor,
        backoff_factor=1 / scale_factor,
        growth_interval=scale_window,
        floor=1.0,
        arithmetic="float64",
    )


def fixed_manager(loss_scale: float = 128.0, drop_overflow_update: bool = True) -> Static:
    """Returns the rule of `FixedLossScaleManager`."""
    del drop_overflow_update
    return Static(loss_scale)


def fixed_update_cell(loss_scale_value: float) -> Static:
    """Returns the rule of `nn.FixedLossScaleUpdateCell`."""
    return Static(loss_scale_value)


def static_loss_scaler(scale_value: float) -> Static:
    """Returns the rule of `amp.StaticLossScaler`."""
    return Static(scale_value)


PEER = Peer(
    name="mindspore",
    variants={
        "nn.DynamicLossScaleUpdateCell": dynamic_update_cell,
        "amp.DynamicLossScaler": dynamic_loss_scaler,
        "DynamicLossScaleManager": dynamic_manager,
        "FixedLossScaleManager": fixed_manager,
        "nn.FixedLossScaleUpdateCell": fixed_update_cell,
        "amp.StaticLossScaler": static_loss_scaler,
    },
)
