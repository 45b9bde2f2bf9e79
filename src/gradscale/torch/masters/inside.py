"""The optimizer inside `MasterWeights`: what it is told, and how it is stepped on a part of its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.kernels.torch import tensor_groups
from gradscale.torch.step import apply
from gradscale.torch.step.gradients import values_of
from gradscale.torch.step.host_copy import host_value

Optimizer = torch.optim.Optimizer

NOT_SETTINGS = ("params", "param_names")


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies learning rates and other settings from one optimizer's groups to another's."""
    for given, taken in zip(source, target, strict=True):
        taken.update({name: value for name, value in given.items() if name not in NOT_SETTINGS})


def can_be_split(optimizer: Optimizer) -> bool:
    """Returns whether to step on one part of the parameters after the other is the same as to step on all at once.

    It is for torch's own optimizers, which treat each parameter by itself. Others may count steps in a group, or look
    at all gradients together; and a hook expects to be called once.
    """
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooked


@contextmanager
def only(optimizer: Optimizer, group: int, masters: Sequence[Tensor]) -> Iterator[None]:
    """Makes the optimizer believe that these, of one of its groups, are all the parameters it has."""
    whole = optimizer.param_groups
    optimizer.param_groups = [{**whole[group], "params": list(masters)}]
    try:
        yield
    finally:
        optimizer.param_groups = whole


class Gate:
    """Whether a step goes ahead, and what its gradients are to be divided by.

    Args:
        divisor: a 0-d float32; None leaves the gradients as they are.
        skip: a 0-d float32, 1 to skip and 0 to go ahead; None goes ahead.
    """

    def __init__(self, divisor: Tensor | None, skip: Tensor | None) -> None:
        self._divisor = divisor
        self._skip = skip
        self._closed: bool | None = False
        if skip is not None:
            known = host_value(skip)
            self._closed = None if known is None else known != 0.0

    @property
    def known_closed(self) -> bool:
        """Whether it is known without waiting that the step is skipped."""
        return bool(self._closed)

    def step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Steps the optimizer on divided gradients, unless the gate is closed.

        A fused optimizer takes both into its kernel. For any other the gradients are divided by one multi-tensor
        kernel, and the host waits for the gate, once.

        Args:
            optimizer: all that it holds is stepped.
            parameters: those that have gradients.
        """
        if self._divisor is None and self._skip is None:
            optimizer.step()
        elif apply.folds(optimizer):
            skip = torch.zeros((), device="cpu") if self._skip is None else self._skip
            apply.step_folded(optimizer, self._divisor, skip)
        elif not self._is_closed():
            if self._divisor is not None:
                _divide(parameters, self._divisor)
            optimizer.step()

    def _is_closed(self) -> bool:
        if self._closed is None:
            self._closed = bool(self._skip)
        return self._closed


def _divide(parameters: Sequence[Tensor], divisor: Tensor) -> None:
    """Divides the gradients in place, as fused kernels do: by a division, not by a product with the inverse."""
    values = [values_of(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for group in tensor_groups(values):
        torch._foreach_div_(group.tensors, divisor.to(group.device, non_blocking=True))  # pyright: ignore[reportPrivateImportUsage]
