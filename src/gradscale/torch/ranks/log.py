"""What all ranks would log alike, logged by one of them."""

import torch.distributed as dist

from gradscale.engine.saved_text import note_policy
from gradscale.policies.contract import Policy


def is_first_rank() -> bool:
    """Returns whether this process logs for all: rank 0, or one without ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def note_loaded_policy(present: Policy | None, saved: Policy | None) -> None:
    """Logs on rank 0 what a load does with a saved policy that is another one. None is torch's own rule."""
    if is_first_rank():
        note_policy(present, saved)
