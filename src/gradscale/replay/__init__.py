"""Replays any policies over a recorded sequence of steps."""

from gradscale.replay.run import Replay, Summary, replay

__all__ = ["Replay", "Summary", "replay"]
