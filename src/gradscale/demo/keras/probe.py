"""What is measured of a run from outside: gradients lost, exponents, scores; each compiled once for all runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradscale.demo.digits import Array, Digits
from gradscale.demo.keras.gradients import differentiated
from gradscale.demo.keras.model import Network, make_taps
from gradscale.demo.numpy.model import ACCURACY, PIXEL_ERROR
from gradscale.demo.run import Run
from gradscale.histogram import exponent_histogram

FULL, HALF = "float32", "mixed_float16"


class Probe:
    """Networks of its own in both precisions, which take over the weights of a run."""

    def __init__(self, weights: Sequence[Array]) -> None:
        """Makes the networks.

        Args:
            weights: any that fit.
        """
        self._networks: dict[str, Any] = {dtype: Network(dtype, weights) for dtype in (FULL, HALF)}
        self._gradients = {dtype: differentiated(network) for dtype, network in self._networks.items()}

    def sample(
        self, run: Run, step: int, dtype: str, weights: Sequence[Array], wanted: dict[str, Array], scale: float
    ) -> None:
        """Adds to the run what the gradients of a step lose, and the exponents of those that FP32 makes.

        Args:
            run: what to add to.
            step: number of the step.
            dtype: what it computes in.
            weights: those that it starts from.
            wanted: the targets of its batch, of which the decoder's are its images too.
            scale: what its loss is multiplied by.
        """
        images = wanted["decoder"]
        for network in self._networks.values():
            network.set_weights(weights)
        kept_grads = self._gradients[dtype](images, [], wanted, scale)
        true_grads = self._gradients[FULL](images, make_taps(len(images)), wanted, 1.0)
        pairs = list(zip(true_grads[: len(kept_grads)], kept_grads, strict=True))  # those of the weights come first
        nonzero = sum(int(np.count_nonzero(true)) for true, _ in pairs)
        lost = sum(int(np.count_nonzero((true != 0) & (kept == 0))) for true, kept in pairs)
        run.sampled.append(step)
        run.lost.append(lost / max(1, nonzero))
        run.histogram = run.histogram + exponent_histogram(true_grads)

    def scores(self, weights: Sequence[Array], digits: Digits) -> dict[str, float]:
        """Returns the share of test images classified rightly, and the mean squared error of their pixels, in FP32."""
        network = self._networks[FULL]
        network.set_weights(weights)
        outputs = network.predict_on_batch(digits.test_images)
        guesses = np.argmax(outputs["classifier"], axis=1)
        return {
            ACCURACY.name: float(np.mean(guesses == digits.test_labels)),
            PIXEL_ERROR.name: float(np.mean(np.square(outputs["decoder"] - digits.test_images))),
        }
