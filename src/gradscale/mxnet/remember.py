"""Remember: whether the losses since the last step were finite, and how large the weights are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mxnet import autograd, nd

from gradscale.engine.health import Weights


class Losses:
    """Whether the losses since the last step were finite: one flag on each context, read only in the step."""

    def __init__(self) -> None:
        self._earlier: dict[Any, Any] = {}
        self._last: list[Any] = []

    @property
    def given(self) -> bool:
        """Whether there was a loss since the last step."""
        return bool(self._last)

    def add(self, losses: Sequence[Any]) -> None:
        """Checks the losses of one more backward pass. Does not synchronize with the device."""
        with autograd.pause():
            # Kept on the device and multiplied there. Reading it here would block until the forward pass is done.
            for flag in self._last:
                before = self._earlier.get(flag.context)
                self._earlier[flag.context] = flag if before is None else before * flag
            self._last = [nd.multi_all_finite(loss.as_nd_ndarray(), num_arrays=1) for loss in losses]

    def finite(self) -> tuple[bool, bool]:
        """Returns whether all of them were finite, and whether the last ones were. Synchronizes with the device."""
        last = all(flag.asscalar() == 1 for flag in self._last)
        return last and all(flag.asscalar() == 1 for flag in self._earlier.values()), last


def weights_of(trainer: Any) -> Weights | None:
    """Returns how large the weights of a trainer are; None if it has none. Copies them to the host."""
    trained = [parameter for parameter in trainer._params if parameter.grad_req != "null"]
    # Of the first context: all hold the same weights.
    values = [(np.abs(parameter.list_data()[0].asnumpy()), parameter.name) for parameter in trained]
    sizes = [(float(magnitudes.max()), name) for magnitudes, name in values if magnitudes.size]
    return Weights.of(sizes, learning_rate=float(trainer.learning_rate))
