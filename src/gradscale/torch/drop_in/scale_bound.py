"""What the host knows of the scale without synchronizing with the device."""

from torch import Tensor

from gradscale.torch.step.host_copy import HostCopy

ASK_BELOW = 2.0**8
"""Bound below which the device is asked for its scale: early enough for the answer to arrive before it is needed."""


class ScaleBound:
    """A lower bound of the scale, kept on the host.

    Whoever updates the scale says how far it may have fallen, and the bound falls with it. When it has become small a
    host copy of the scale is made, and replaces the bound once it has arrived. A scale that others wrote to is
    recognised by its version.
    """

    __slots__ = ("_bound", "_copy", "_factor", "_scale", "_version")

    def __init__(self) -> None:
        self._bound = 0.0
        self._factor = 1.0
        self._copy: HostCopy | None = None
        self._scale: Tensor | None = None
        self._version = -1

    def set(self, scale: Tensor, value: float) -> None:
        """Sets the bound to the value that `scale` has now."""
        self._bound, self._copy = value, None
        self._scale, self._version = scale, scale._version

    def revalidate(self, scale: Tensor) -> None:
        """Forgets the bound if others have written to `scale`. To be called before updating it."""
        if scale is not self._scale or scale._version != self._version:
            self.set(scale, 0.0)
            self._ask(scale)

    def lowered(self, scale: Tensor, by: float) -> None:
        """Lowers the bound: `scale` was updated, at worst to `by` times what it was."""
        self._bound *= by
        self._factor *= by
        self._version = scale._version
        if self._bound < ASK_BELOW:
            self._ask(scale)

    def may_be_below_one(self, scale: Tensor) -> bool:
        """Returns False only where `scale` is surely 1 or more. Does not synchronize with the device."""
        self.revalidate(scale)
        self._receive()
        return self._bound < 1.0

    def _ask(self, scale: Tensor) -> None:
        self._receive()
        if self._copy is None:
            self._copy, self._factor = HostCopy(scale), 1.0

    def _receive(self) -> None:
        if self._copy is not None and self._copy.arrived:
            self._bound, self._copy = self._copy.read()[0] * self._factor, None
