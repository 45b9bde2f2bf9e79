"""What tensors of a model look like, forward and backward, at sampled steps."""

from gradscale.torch.watch.watch import Watch, watch
from gradscale.watching.rows import WatchRow

__all__ = ["Watch", "WatchRow", "watch"]
