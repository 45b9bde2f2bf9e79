"""What is raised on every rank when one of them cannot go on, or they no longer have the same scale."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from gradscale.engine import desync as engine


class RankFailed(RuntimeError):
    """Raised on every rank at once when one of them could not take part in a step, with its reason.

    That rank raises its own error. The step was applied on none of them, unless `applied` is True: a rank was refused
    in an earlier step, which the others have applied, and their weights are no longer the same. Every later `step`
    raises it again then, until `load_state_dict` is called on every rank.

    Attributes:
        reasons: the reason of each rank that failed, of the first 8 if there are more.
        applied: whether other ranks have applied a step that these ranks have missed.
    """

    def __init__(self, reasons: Mapping[int, str], applied: bool = False) -> None:
        self.reasons, self.applied = dict(reasons), applied
        listed = " ".join(f"Rank {rank}: {reason}" for rank, reason in self.reasons.items())
        if applied:
            text = (
                "A step was applied on some ranks and not on others: their weights are no longer the same. "
                f"{listed} Load a checkpoint of the model, the optimizer and the scaler on every rank."
            )
        else:
            text = f"The step was applied on no rank, since not all of them could take part in it. {listed}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[Mapping[int, str], bool]]:
        """Returns how a pickle makes it again: multiprocessing sends errors to the parent process."""
        return RankFailed, (self.reasons, self.applied)


class ScaleDesync(engine.ScaleDesync):
    """Raised on every rank at once when their scales differ. The step was applied on none of them.

    Attributes:
        scales: the scale of every rank.
    """

    def __init__(self, scales: Mapping[int, float]) -> None:
        self.scales = dict(scales)
        ranks: dict[float, list[int]] = {}
        for rank, scale in self.scales.items():
            ranks.setdefault(scale, []).append(rank)
        listed = "; ".join(f"{scale:g} on rank {listed_ranks(held)}" for scale, held in ranks.items())
        super().__init__(
            f"Ranks that decide together must have the same scale. Received: {listed}. Load the state of the scaler on "
            'every rank, or build it with `group="alone"` where ranks train separate models.'
        )

    def __reduce__(self) -> tuple[type["ScaleDesync"], tuple[Mapping[int, float]]]:
        """Returns how a pickle makes it again: multiprocessing sends errors to the parent process."""
        return ScaleDesync, (self.scales,)


def listed_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as text: the first of many.

    >>> listed_ranks([0, 1, 2])
    '0, 1, 2'
    """
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def refuse_distinct(received: str = "plain gradients that differ between ranks") -> NoReturn:
    """Raises where a norm is needed, and what was `received` are gradients that are not the same on every rank."""
    raise RuntimeError(
        "A norm over all gradients counts those once that are the same on every rank. Plain tensors, and meshes of "
        f"fewer ranks, are taken to be. Received: {received}. Name the ranks over which they are distinct, such as "
        "the stages of a pipeline: `LossScaler(model, distinct=group)`. Gradients of data-parallel ranks must be "
        'reduced before `step`, and ranks that train separate models take `LossScaler(model, group="alone")`.'
    )


def refuse_other_calls(asked: int, ranks: int) -> NoReturn:
    """Raises if ranks are in a step, and others, `asked` of them, in a call that asks for flags outside of one."""
    raise RuntimeError(
        "Ranks that decide together must make the same calls. Received: `backward` with `retries`, `grad` or `probe` "
        f"on {asked} of {ranks} ranks, and `step` on the others. Pass the same `retries` to `backward` on every rank."
    )


def check_arguments(ranks: int, *, amax: int, norm: int) -> None:
    """Raises if only some of the ranks have read the largest magnitude, or a norm."""
    for what, asked in (("a largest magnitude", amax), ("`clip_norm` or `norm`", norm)):
        if 0 < asked < ranks:
            raise RuntimeError(
                f"All ranks must call `step` with the same arguments and the same policy. Received: {what} on {asked} "
                f"of {ranks} ranks. Pass the same everywhere."
            )
