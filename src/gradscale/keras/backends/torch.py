"""Keras on torch: one synchronization with the device, after which the rule runs on the host."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradscale.histogram.counts import ExponentHistogram
from gradscale.keras.backends import Backend, Update
from gradscale.keras.variables import on_host
from gradscale.kernels.torch import largest, norms, share_above, single, single_norm
from gradscale.kernels.torch_exponents import tally
from gradscale.policies.scalars import SCALARS

T = TypeVar("T")

eager: Any = torch.compiler.disable
"""For what ends in a read by the host, where there is nothing to compile."""


class Torch(Backend):
    """Eagerly. Keras leaves several devices to torch, so that there are no replicas."""

    # numpy scalars on the host: 0.9 times the time of a step of Keras's class, where `keras.ops` on tensors took 1.04.
    XP = SCALARS
    ARRAYS = np

    @eager
    def sizes(self, values: Sequence[Tensor], *, peaks: bool, kinds: bool) -> Tensor:
        del peaks, kinds
        return single(largest(values, values[0].device))

    @eager
    def norm(self, values: Sequence[Tensor]) -> Tensor:
        return single_norm(torch.linalg.vector_norm(norms(values, values[0].device)))

    @eager
    def share_above(self, values: Sequence[Tensor], edge: float) -> Tensor:
        device = values[0].device
        return share_above(values, torch.tensor(edge, device=device), device)

    @eager
    def agree(self, numbers: Tensor) -> Any:
        """Returns the numbers on the host: one copy for all of them."""
        return np.array(numbers.tolist(), np.float32)

    @eager
    @np.errstate(all="ignore")
    def merge_call(
        self, finish: Callable[[Any, Update], T], numbers: Any, update: Any, grads: Any, variables: Any
    ) -> T:
        return super().merge_call(finish, numbers, update, grads, variables)

    def multiplied(self, grads: Sequence[Any], factor: Any) -> list[Any]:
        """Returns gradients multiplied by the factor, in float32 or wider: one call for all of them."""
        wide = [grad.float() if grad.dtype.itemsize < 4 else grad for grad in grads]
        return list(torch._foreach_mul(wide, float(factor))) if wide else []  # pyright: ignore[reportPrivateImportUsage]

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def values(self, grad: Tensor) -> Tensor:
        return grad.coalesce().values() if grad.is_sparse else grad.detach()

    def counts(self, arrays: Sequence[Any]) -> list[tuple[ExponentHistogram, float]]:
        return [(found.histogram, found.amax) for found in (tally(array.detach()) for array in arrays)]

    def leaves(self, value: Any, dtype: str) -> list[Any]:
        return on_host(value, dtype)

    def vector(self, leaves: Sequence[Any], dtype: str) -> Any:
        return np.array(leaves, dtype)

    def place(self, value: Any) -> str:
        return f"<on {value.device}>" if isinstance(value, Tensor) and value.device.type != "cpu" else ""


BACKEND = Torch()
