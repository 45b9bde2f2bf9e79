"""What a run trains: a model, and the losses of each step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Turn:
    """One backward pass and the step that follows.

    Attributes:
        optimizer: what steps.
        loss: computes the loss. Its batch was drawn before, so that it can be called again.
        clip_norm: the norm to clip at, in runs with clipping.
        bad: whether the batch is one that the task has spoilt. No policy can know of it before.
    """

    optimizer: Optimizer
    loss: Callable[[], Tensor]
    clip_norm: float = 1.0
    bad: bool = False


class Task(Protocol):
    """A model and its training data, in one random order."""

    model: nn.Module

    def turns(self, step: int) -> Iterable[Turn]:
        """Yields what step `step` consists of: one turn, or one for each network."""
        ...

    def score(self, losses: list[float]) -> float:
        """Returns what is reported of a step, less being better, by the losses of its turns."""
        ...


@dataclass(frozen=True)
class TaskSpec:
    """A task of the study.

    Attributes:
        make: returns the task for a seed.
        steps: how long it is trained in the full form.
        init_scale: where every policy has to start; None for its own. FP32 and a policy that starts there anyway are
            not run again: theirs are the runs of the task with the same `make`.
        held_out: 0 if `auto` was tuned on it; otherwise the number of the held-out set that it is in, from 1 on.
        blocks: whether small and large gradients take turns for many steps each.
        bad_batches: whether some batches are spoilt.
    """

    make: Callable[[int], Task]
    steps: int = 1500
    init_scale: float | None = None
    held_out: int = 0
    blocks: bool = False
    bad_batches: bool = False
