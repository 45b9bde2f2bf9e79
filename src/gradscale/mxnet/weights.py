"""How large the weights of a trainer are, for the report of a run that is stuck."""

from typing import Any

import numpy as np

from gradscale.engine.diagnosis import Weights


def weights_of(trainer: Any) -> Weights | None:
    """Returns how large the weights of a trainer are; None if it has none. Copies them to the host."""
    trained = [parameter for parameter in trainer._params if parameter.grad_req != "null"]
    # Of the first context: all hold the same weights.
    values = [(np.abs(parameter.list_data()[0].asnumpy()), parameter.name) for parameter in trained]
    sizes = [(float(magnitudes.max()), name) for magnitudes, name in values if magnitudes.size]
    return Weights.of(sizes, learning_rate=float(trainer.learning_rate))
