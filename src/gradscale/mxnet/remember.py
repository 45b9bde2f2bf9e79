"""Remember: whether the losses since the last step were finite."""

from typing import Any

from mxnet import autograd, nd


class Losses:
    """Whether the losses since the last step were finite: one flag on each context, read only in the step."""

    def __init__(self) -> None:
        self._flags: dict[Any, Any] = {}

    @property
    def given(self) -> bool:
        """Whether there was a loss since the last step."""
        return bool(self._flags)

    def add(self, loss: Any) -> None:
        """Checks one more loss. Does not synchronize with the device."""
        with autograd.pause():
            # Kept on the device and multiplied there. Reading it here would block until the forward pass is done.
            flag = nd.multi_all_finite(loss.as_nd_ndarray(), num_arrays=1)
            before = self._flags.get(loss.context)
            self._flags[loss.context] = flag if before is None else before * flag

    def finite(self) -> bool:
        """Returns whether all of them were finite. Synchronizes with the device."""
        return all(flag.asscalar() == 1 for flag in self._flags.values())
