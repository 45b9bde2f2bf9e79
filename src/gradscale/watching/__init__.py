"""What every adapter's `watch` shares: which steps are sampled, what was counted of tensors, rows and tables of it."""

from gradscale.watching.record import WatchRecord
from gradscale.watching.rows import WatchRow

__all__ = ["WatchRecord", "WatchRow"]
