"""Faults on single ranks, drawn from a seed: every rank, and one process alone, knows all of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Place = Literal["loss", "backward", "gradient"]
LossFunction = Callable[[Tensor, Tensor], Tensor]
VALUES = (float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Fault:
    """An inf or NaN on one rank.

    Attributes:
        rank: where it is.
        place: in the `"loss"`; in the `"backward"` pass, before gradients are reduced over ranks; or in a `"gradient"`,
            after that.
        value: inf, -inf or NaN.
        position: chooses the gradient.
    """

    rank: int
    place: Place
    value: float
    position: int


def draw_faults(
    steps: int, ranks: int, places: Sequence[Place] = get_args(Place), every: int = 8, seed: int = 0
) -> dict[int, Fault]:
    """Returns faults by step: at about one step of `every`, on a random rank, in random `places`."""
    draw = random.Random(seed)
    return {
        step: Fault(draw.randrange(ranks), draw.choice(places), draw.choice(VALUES), draw.randrange(1000))
        for step in range(steps)
        if draw.randrange(every) == 0
    }


def in_stages(faults: Mapping[int, Fault]) -> dict[int, Fault]:
    """Returns the faults of pipelines of two ranks each, whose losses are on the second."""
    return {
        step: fault if fault.place == "gradient" else replace(fault, rank=fault.rank | 1)
        for step, fault in faults.items()
    }


@dataclass(frozen=True)
class Injection:
    """Puts the faults of one rank into its losses and gradients; of all ranks, where `rank` is None."""

    faults: Mapping[int, Fault]
    rank: int | None = None

    def _at(self, step: int, place: str) -> Fault | None:
        fault = self.faults.get(step)
        return fault if fault is not None and fault.place == place and self.rank in (None, fault.rank) else None

    def loss(self, step: int, loss_fn: LossFunction, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss, or one that is not finite, or that has a gradient which is not."""
        if (backward := self._at(step, "backward")) is not None:
            logits.register_hook(lambda grad: grad * backward.value)
        loss = loss_fn(logits, targets)
        fault = self._at(step, "loss")
        return loss if fault is None else loss * fault.value

    def into_gradients(self, step: int, model: nn.Module) -> None:
        """Writes to one element of a gradient, in the part of it that this rank holds."""
        fault = self._at(step, "gradient")
        if fault is None:
            return
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        held: list[Tensor] = [getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads]
        with torch.no_grad():
            present = [local for local in held if local.numel()]
            chosen = present[fault.position % len(present)].view(-1)
            chosen[fault.position % len(chosen)] = fault.value
