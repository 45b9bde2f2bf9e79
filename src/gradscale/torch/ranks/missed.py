"""A step that was applied on some ranks and not on others: none of them goes on until a state is loaded."""

from gradscale.torch.accumulation.window import Window
from gradscale.torch.ranks.errors import RankFailed


class Missed:
    """What this rank knows of steps that were not applied on all ranks.

    Where a step has no round, or has had it, a rank that fails in it learns so alone: the others have applied it. They
    learn of it in the round of the next step, if this rank goes on to it.
    """

    def __init__(self) -> None:
        self._refused = False
        self._error: RankFailed | None = None

    def __reduce__(self) -> tuple[type["Missed"], tuple[()]]:
        """A copy has missed no step."""
        return Missed, ()

    def __bool__(self) -> bool:
        return self._refused or self._error is not None

    def refuse(self) -> None:
        """Notes that this rank has failed in a step, and that the others do not know of it."""
        self._refused = True

    def check_again(self, window: Window | None) -> None:
        """Raises if this rank repeats a step that it has failed in, to which no other rank comes.

        `window` is the one that is open: None if no loss was scaled since.
        """
        if self._refused and window is None:
            raise RuntimeError(
                "`step` has failed on this rank and cannot be repeated: the other ranks may have applied the step, and "
                "their weights are then no longer the same as here. End the process, or load a checkpoint of the "
                "model, the optimizer and the scaler on every rank."
            )

    def note(self, error: RankFailed) -> None:
        """Notes what all ranks have raised. From now on each of them raises it at every step."""
        if error.applied:
            self._refused, self._error = False, error

    def raise_again(self) -> None:
        """Raises what all ranks have raised before. In a round, so that one which has loaded a state learns of it."""
        # Before what the round has found: ranks with different weights have different gradients, too.
        if self._error is not None:
            raise RankFailed(self._error.reasons, applied=True)

    def end_round(self) -> None:
        """Goes on after a round that has found nothing: a step that all ranks have missed was applied on none."""
        self._refused = False

    def forget(self) -> None:
        """Goes on from a state that was loaded. What the other ranks do not know yet they must learn all the same."""
        self._error = None
