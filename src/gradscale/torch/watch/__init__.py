"""What tensors of a model look like, forward and backward, at sampled steps."""

from gradscale.torch.watch.rows import WatchRow
from gradscale.torch.watch.watch import Watch, watch

__all__ = ["Watch", "WatchRow", "watch"]
