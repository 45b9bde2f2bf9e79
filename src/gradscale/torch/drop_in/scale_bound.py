"""A lower bound of the scale, known on the host without synchronizing with the device."""

from torch import Tensor

from gradscale.torch.step.host_copy import HostCopy, host_value

ASK_BELOW = 2.0**8
"""Bound below which a host copy of the scale is started: eight halvings before 1, so that it arrives in time."""


class ScaleBound:
    """A lower bound of the scale, kept on the host.

    Every update of the scale lowers the bound as if the scale had backed off. When it is small, a host copy of the
    scale is started, and replaces the bound once it has arrived. Writes to the scale by other code are recognized by
    its version.
    """

    # Used to skip a second read of the gradients, which only a scale below 1 needs. Reading the scale itself at every
    # step would synchronize, unless it is in host memory: there it is read, and the bound is not used.

    __slots__ = ("_bound", "_copy", "_factor", "_scale", "_version")

    def __init__(self) -> None:
        self._bound = 0.0
        self._factor = 1.0
        self._copy: HostCopy | None = None
        self._scale: Tensor | None = None
        self._version = -1

    def set(self, scale: Tensor, value: float) -> None:
        """Sets the bound to `value`, which `scale` has now."""
        self._bound, self._copy = value, None
        self._scale, self._version = scale, scale._version

    def revalidate(self, scale: Tensor) -> None:
        """Sets the bound to 0 if other code has written to `scale`. Call it before an update of the scale."""
        if scale is not self._scale or scale._version != self._version:
            self.set(scale, 0.0)
            self._ask(scale)

    def lowered(self, scale: Tensor, by: float) -> None:
        """Lowers the bound after an update that multiplied `scale` by at least `by`."""
        self._bound *= by
        self._factor *= by  # a pending copy is older than this update
        self._version = scale._version
        if self._bound < ASK_BELOW:
            self._ask(scale)

    def may_be_below_one(self, scale: Tensor) -> bool:
        """Returns False only if `scale` is known to be 1 or more. Does not synchronize with the device."""
        known = host_value(scale)
        if known is not None:
            return known < 1.0
        self.revalidate(scale)
        self._receive()
        return self._bound < 1.0

    def _ask(self, scale: Tensor) -> None:
        self._receive()
        if self._copy is None and host_value(scale) is None:
            self._copy, self._factor = HostCopy(scale), 1.0

    def _receive(self) -> None:
        if self._copy is not None and self._copy.arrived:
            self._bound, self._copy = self._copy.read()[0] * self._factor, None
