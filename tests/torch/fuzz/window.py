"""The accumulation window of the reference."""

from dataclasses import dataclass, field

from tests.torch.fuzz.gradient import Gradient


@dataclass
class Window:
    """What happened since the last step, as far as the result of the next depends on it.

    Attributes:
        scale: of all its losses.
        began: whether a backward pass has begun.
        loss_finite: whether every loss was finite.
        overflowed: whether gradients outside of the step overflowed.
        retries: how often a backward pass was run again.
        left: whether its last backward pass has left a gradient of a parameter that the scaler knows.
        unscaled: the parameters whose gradients `unscaled` has divided.
        as_made: these gradients before any edit.
    """

    scale: float
    began: bool = False
    loss_finite: bool = True
    overflowed: bool = False
    retries: int = 0
    left: bool = False
    unscaled: set[str] = field(default_factory=set)
    as_made: dict[str, Gradient] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins a backward pass: nothing is unscaled any more."""
        self.unscaled, self.as_made, self.began = set(), {}, True
