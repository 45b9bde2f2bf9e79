"""Adam on float32 master weights."""

from typing import Any

import numpy as np

from gradscale.numpy.tree import named_arrays


class Adam:
    """Updates parameters in place. The defaults are those of `torch.optim.Adam`, except for the learning rate."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self._params = [array for _, array in named_arrays(params)]
        self._means = [np.zeros_like(param) for param in self._params]
        self._squares = [np.zeros_like(param) for param in self._params]
        self._lr, self._betas, self._eps = lr, betas, eps
        self._steps = 0

    def update(self, grads: Any) -> None:
        """Takes a step with unscaled gradients, in the structure of the parameters."""
        self._steps += 1
        first, second = self._betas
        root = (1 - second**self._steps) ** 0.5
        rate = self._lr * root / (1 - first**self._steps)
        arrays = [array for _, array in named_arrays(grads)]
        for param, mean, square, grad in zip(self._params, self._means, self._squares, arrays, strict=True):
            mean += np.float32(1 - first) * (grad - mean)
            square += np.float32(1 - second) * (grad * grad - square)
            param -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(self._eps * root))
