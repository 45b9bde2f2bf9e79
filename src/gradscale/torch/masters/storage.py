"""The storages of master weights by name, the plain one, and their sizes."""

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from gradscale.torch.masters.contract import MasterStorage, refined
from gradscale.torch.masters.kahan import Kahan
from gradscale.torch.masters.remainder import Remainder
from gradscale.torch.masters.step_buffers import StepBuffer
from gradscale.torch.masters.stochastic import Stochastic

Storage = Literal["fp32", "remainder", "kahan", "stochastic"]


class Full(MasterStorage):
    """Stores the float32 value. The weight is that value, rounded to nearest, ties to even."""

    stored_bytes: ClassVar[int] = 4
    stores_values: ClassVar[bool] = True

    def store(self, weight: Tensor) -> Tensor:
        """Returns the weight in float32."""
        return weight.detach().float()

    def read(self, weights: Sequence[Tensor], stored: Sequence[Tensor], buffer: StepBuffer) -> Sequence[Tensor]:
        """Returns what is stored, without a copy."""
        del weights, buffer
        return stored

    def write(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        stored: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Rounds the values into the weights: one multi-tensor kernel."""
        del stored, parameters
        torch._foreach_copy_(list(weights), list(values))  # pyright: ignore[reportPrivateImportUsage]

    def adopt(self, weight: Tensor, stored: Tensor) -> None:
        """Sets the stored value to the weight where it does not round to it."""
        # Not everywhere: weights that were swapped for an average and back again keep their low bits.
        stored.copy_(refined(weight, stored))

    def restore(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Loads saved values where they round to the weight."""
        stored.copy_(refined(weight, value))


_STORAGES: dict[str, type[MasterStorage]] = {
    "fp32": Full,
    "remainder": Remainder,
    "kahan": Kahan,
    "stochastic": Stochastic,
}


def make_storage(storage: Storage, seed: int | None = None) -> MasterStorage:
    """Returns a new storage. Only `"stochastic"` takes a `seed`; None draws one from torch's random numbers."""
    if storage not in _STORAGES:
        raise ValueError(
            f"`storage` must be one of {', '.join(map(repr, get_args(Storage)))}. Received: storage={storage!r}."
        )
    if storage == "stochastic":
        return Stochastic(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    if seed is not None:
        raise ValueError(
            "`seed` is for storage='stochastic', the only one that draws random numbers. "
            f"Received: seed={seed!r} with storage={storage!r}."
        )
    return _STORAGES[storage]()


def master_bytes(storage: Storage) -> int:
    """Returns how many bytes are stored beside each element of a 16-bit weight."""
    return _STORAGES[storage].stored_bytes


def bytes_per_parameter(storage: Storage, *, grad_fp32: bool = False) -> int:
    """Returns the bytes of a parameter: the 16-bit weight, what is stored beside it, and its gradient.

    The optimizer's own state, such as the 8 bytes of Adam's two moments, is not included. It is float32 in every
    storage.

    >>> {storage: bytes_per_parameter(storage) for storage in ("fp32", "remainder", "kahan", "stochastic")}
    {'fp32': 8, 'remainder': 6, 'kahan': 6, 'stochastic': 4}

    Args:
        storage: how the low bits are stored.
        grad_fp32: whether gradients are float32.
    """
    weight_bytes = 2
    return weight_bytes + master_bytes(storage) + (4 if grad_fp32 else 2)
