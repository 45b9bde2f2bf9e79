"""flax: `flax.training.dynamic_scale.DynamicScale`."""

import numpy as np

from gradscale.peers._ladder import Ladder
from gradscale.peers._peer import Peer

_FLOAT32 = np.finfo(np.float32)


def dynamic_scale(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    fin_steps: int = 0,
    scale: float = 65536.0,
    minimum_scale: float | None = float(_FLOAT32.tiny),
) -> Ladder:
    """Returns the rule of `DynamicScale`, which tests its counter before it counts: N + 1 clean steps to grow."""
    return Ladder(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        init_clean_steps=fin_steps,
        floor=0.0 if minimum_scale is None else minimum_scale,
        ceiling=float(_FLOAT32.max),
    )


PEER = Peer(name="flax", variants={"DynamicScale": dynamic_scale})
