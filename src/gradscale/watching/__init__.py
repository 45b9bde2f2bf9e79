"""What every adapter's `Watch` shares: which steps are sampled, what was counted of tensors, rows and tables of it."""

from gradscale.watching.rows import WatchRow

__all__ = ["WatchRow"]
