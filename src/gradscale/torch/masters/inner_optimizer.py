"""The inner optimizer of `MasterWeights`: which are accepted, their settings, and steps on a part of the parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.kernels.torch import tensor_groups
from gradscale.torch.step import apply
from gradscale.torch.step.gradients import values_of
from gradscale.torch.step.host_copy import host_value, moved

Optimizer = torch.optim.Optimizer

NOT_SETTINGS = ("params", "param_names")


def check_inner_optimizer(optimizer: Any) -> None:
    """Raises unless this is an optimizer that can be stepped on masters."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "`optimizer` must be a torch optimizer built on the model's parameters. "
            f"Received: {type(optimizer).__name__}."
        )
    if getattr(optimizer, "keeps_masters", False):
        raise TypeError("`optimizer` keeps masters already. Wrap an optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss itself, between its own updates of the parameters, and cannot be stepped on "
            "masters. Keep the model's parameters in float32 for it."
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "A scheduler has been built on this optimizer, and `MasterWeights` would not see its changes. "
            "Build it on the `MasterWeights` instead, after wrapping."
        )


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies learning rates and other settings from one optimizer's groups to another's."""
    for given, group in zip(source, target, strict=True):
        group.update({name: value for name, value in given.items() if name not in NOT_SETTINGS})


def can_be_split(optimizer: Optimizer) -> bool:
    """Returns whether stepping on one part of the parameters after the other is the same as stepping on all at once.

    True for torch's own optimizers, which treat each parameter separately. Others may count steps in a group, or use
    all gradients together; and a hook expects to be called once.
    """
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not hooked


@contextmanager
def only(optimizer: Optimizer, group: int, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Hides all parameters of the optimizer but these, of one of its groups, inside the block."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[group], "params": list(parameters)}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


class Gate:
    """Whether a step is applied, and the divisor of its gradients.

    Args:
        divisor: a 0-d float32; None leaves the gradients as they are.
        skip: a 0-d float32, 1 to skip and 0 to apply; None applies.

    Attributes:
        skip: the same.
    """

    # One for all chunks of a step: the skip is read at most once, and no chunk is stepped while another is skipped.

    def __init__(self, divisor: Tensor | None, skip: Tensor | None) -> None:
        self._divisor = divisor
        self.skip = skip
        self._skips: bool | None = False
        if skip is not None:
            known = host_value(skip)
            self._skips = None if known is None else known != 0.0

    @property
    def known_to_skip(self) -> bool:
        """Whether the host knows that the step is skipped: without synchronizing, or since `step` has read it."""
        return bool(self._skips)

    def step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Steps the optimizer on divided gradients, unless the step is skipped.

        The kernel of a fused optimizer does both, and nothing synchronizes. For any other, one multi-tensor kernel
        divides the gradients of `parameters`, and the host synchronizes with the device once, to read the skip.
        """
        if self._divisor is None and self.skip is None:
            optimizer.step()
        elif apply.folds(optimizer):
            # On the CPU it is known to the host, and the kernel is called without `found_inf`.
            gate = torch.ones((), dtype=torch.bool, device="cpu") if self.skip is None else self.skip == 0
            apply.step_folded(optimizer, self._divisor, gate)
        elif not self._read_skip():
            if self._divisor is not None:
                _divide(parameters, self._divisor)
            apply.step_unfolded(optimizer)

    def _read_skip(self) -> bool:
        if self._skips is None:
            self._skips = bool(self.skip)
        return self._skips


def _divide(parameters: Sequence[Tensor], divisor: Tensor) -> None:
    """Divides the gradients in place."""
    # A division, as in fused kernels: a product with the inverse rounds twice where the divisor is no power of two.
    values = [values_of(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for group in tensor_groups(values):
        torch._foreach_div_(group.tensors, moved(divisor, group.device))  # pyright: ignore[reportPrivateImportUsage]
