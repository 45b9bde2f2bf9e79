"""Whether a state that JAX holds to be the same on all devices is the same."""

from typing import Any

import numpy as np

from gradscale.engine.desync import ScaleDesync


def check_replicas(state: Any) -> None:
    """Raises if the copies of the scale on this process's devices differ. Synchronizes with the device.

    JAX takes one copy for all: a `shard_map` with `check_vma=False` returns what differs as if it did not.

    Raises:
        ScaleDesync: they do. It names the devices.
    """
    scale = state.scale
    if not getattr(scale, "is_fully_replicated", False):
        return
    copies = {shard.device: np.asarray(shard.data) for shard in scale.addressable_shards}
    if any((copy != next(iter(copies.values()))).any() for copy in copies.values()):
        shown = ", ".join(f"{copy.tolist():g} on {device}" for device, copy in copies.items())
        raise ScaleDesync(
            f"A scale must be the same on all devices that share it. Received: {shown}. Start all devices from one "
            "scaler, and agree over every axis that they share."
        )
