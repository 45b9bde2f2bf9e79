"""What the host knows of the scale without waiting for the device."""

from torch import Tensor

from gradscale.torch.step.host_copy import Letter

ASK_BELOW = 2.0**8
"""Bound below which the device is asked for its scale: early enough for the answer to arrive before it is needed."""


class KnownScale:
    """A number that the scale is not below, kept on the host.

    Whoever moves the scale says how far it may have fallen, and the number falls with it. When it has become small the
    true scale is sent for, and replaces it once it has arrived. A scale that others wrote to is known by its version.
    """

    __slots__ = ("_bound", "_fallen", "_letter", "_scale", "_version")

    def __init__(self) -> None:
        self._bound = 0.0
        self._fallen = 1.0
        self._letter: Letter | None = None
        self._scale: Tensor | None = None
        self._version = -1

    def know(self, scale: Tensor, value: float) -> None:
        """Takes over that `scale` is now `value`."""
        self._bound, self._letter = value, None
        self._scale, self._version = scale, scale._version

    def check(self, scale: Tensor) -> None:
        """Forgets everything if others have written to `scale`. To be called before moving it."""
        if scale is not self._scale or scale._version != self._version:
            self.know(scale, 0.0)
            self._ask(scale)

    def moved(self, scale: Tensor, fell_to: float) -> None:
        """Takes over that `scale` was moved, at worst to `fell_to` times what it was."""
        self._bound *= fell_to
        self._fallen *= fell_to
        self._version = scale._version
        if self._bound < ASK_BELOW:
            self._ask(scale)

    def may_be_below_one(self, scale: Tensor) -> bool:
        """Returns False only where `scale` is 1 or more for sure. Does not wait for the device."""
        self.check(scale)
        self._listen()
        return self._bound < 1.0

    def _ask(self, scale: Tensor) -> None:
        self._listen()
        if self._letter is None:
            self._letter, self._fallen = Letter(scale), 1.0

    def _listen(self) -> None:
        if self._letter is not None and self._letter.arrived:
            self._bound, self._letter = self._letter.read()[0] * self._fallen, None
