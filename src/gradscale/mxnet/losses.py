"""Losses: what may be one, and whether all since the last step were finite."""

from typing import Any

import numpy as np
from mxnet import autograd, nd

from gradscale.mxnet.measure import all_finite
from gradscale.policies.contract import Policy


class Losses:
    """Whether the losses since the last step were finite: a flag per context, on the context, so that nobody waits."""

    def __init__(self) -> None:
        self._flags: dict[Any, Any] = {}

    @property
    def given(self) -> bool:
        """Whether there was a loss since the last step."""
        return bool(self._flags)

    def add(self, loss: Any) -> None:
        """Takes account of one more loss. Does not wait for the device."""
        with autograd.pause():
            flag = all_finite([loss.as_nd_ndarray()])
            before = self._flags.get(loss.context)
            self._flags[loss.context] = flag if before is None else before * flag

    def finite(self) -> bool:
        """Returns whether all of them were finite. Waits for the device."""
        return all(flag.asscalar() == 1 for flag in self._flags.values())

    def forget(self) -> None:
        """Starts anew, for the next step."""
        self._flags.clear()


def check_loss(loss: Any, policy: Policy) -> None:
    """Raises if the scale cannot multiply `loss`, or its gradient, exactly."""
    if not isinstance(loss, nd.NDArray):
        raise TypeError(
            f"`loss` must be an MXNet array, or a list or tuple of them. Received: {loss!r} ({type(loss).__name__})."
        )
    kind = np.dtype(loss.dtype)  # MXNet's bfloat16 is a record with one field, named so
    if kind.kind != "f" or (kind.itemsize < 4 and policy.needs):
        raise TypeError(
            "A loss must be float32 or wider, as a scale like 65536 does not fit a narrower type. "
            f"Received: {kind.names[0] if kind.names else kind.name}. "
            "Cast what the model puts out, before the loss is taken of it: `outputs.astype('float32')`."
        )
