"""Whether the losses of a step were finite, as `scale_loss` saw them: Keras gives `apply` the gradients alone."""

from typing import Any

import keras

from gradscale.keras.measure import BACKEND, Gradients


class Losses:
    """Whether the losses that were scaled since the last step were finite: of one replica or several, which agree."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._finite: Any = None

    def add(self, loss: Any) -> None:
        """Adds a loss. Does not synchronize with the device."""
        finite = all_finite(loss)
        owner = BACKEND.owner(finite)
        if self._finite is not None and owner is self._owner:
            finite = keras.ops.logical_and(self._finite, finite)
        self._owner, self._finite = owner, finite

    def take(self, gradients: Gradients) -> Any:
        """Returns whether the losses of `gradients` were finite, and forgets them; None if that is not known.

        It is not where one function that is compiled has scaled the loss and another one applies the gradients.
        """
        owner, finite = self._owner, self._finite
        self._owner = self._finite = None
        owners = [BACKEND.owner(BACKEND.values(grad)) for grad, _ in gradients.present[:1]]
        return finite if owners == [owner] else None


def all_finite(loss: Any) -> Any:
    """Returns whether a loss, or each of an array of losses, is finite, as a flag of the backend."""
    return keras.ops.all(keras.ops.isfinite(loss))
