"""The inner optimizer of `MasterWeights`: which are accepted, their settings, and steps on a part of the parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.kernels.torch import tensor_groups
from gradscale.torch.local import local
from gradscale.torch.masters.master import Master, distributed_as
from gradscale.torch.masters.storage import StepBuffer
from gradscale.torch.step import apply
from gradscale.torch.step.gradients import values_of
from gradscale.torch.step.host_copy import host_value, moved

CHUNK_ON_CPU, CHUNK = 2**21, 2**25
"""Elements stepped at once, except that a tensor is never split. On the CPU few enough to stay in its caches between
the passes; elsewhere enough to keep a device busy, and still few beside a model."""


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
        group.update({name: value for name, value in given.items() if name not in ("params", "param_names")})


def parts(optimizer: Optimizer, groups: Sequence[Sequence[Master]]) -> Iterator[tuple[int | None, list[Master]]]:
    """Yields the parameters that have gradients in chunks of one group and one device, each with its group.

    They are stepped one after the other, so that temporary float32 memory stays small. That is the same as stepping on
    all at once for torch's own optimizers, which treat each parameter separately. Others may count steps in a group, or
    use all gradients together; and a hook expects to be called once. For them all parameters are one part, of no group.

    DTensors and plain parameters, which torch's multi-tensor kernels do not take together, are in different chunks.
    """
    with_gradients = [[master for master in masters if master.weight.grad is not None] for masters in groups]
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooked or not type(optimizer).__module__.startswith("torch.optim."):
        yield None, list(chain.from_iterable(with_gradients))
        return
    for group, masters in enumerate(with_gradients):
        for _, alike in groupby(masters, lambda each: (each.weight.device, getattr(each.weight, "device_mesh", None))):
            chunk, elements = [], 0
            for master in alike:
                count = local(master.weight).numel()
                elements += count
                if chunk and elements > (CHUNK_ON_CPU if master.weight.is_cpu else CHUNK):
                    yield group, chunk
                    chunk, elements = [], count
                chunk.append(master)
            yield group, chunk


@dataclass
class Gate:
    """Whether a step is applied, and the divisor of its gradients.

    Attributes:
        divisor: a 0-d float32; None leaves the gradients as they are.
        skip: a 0-d float32, 1 to skip and 0 to apply; None applies.
        skips: whether the step is skipped; None while the host would have to synchronize to know.
    """

    # One for all chunks of a step: the skip is read at most once, and no chunk is stepped while another is skipped.
    divisor: Tensor | None
    skip: Tensor | None
    skips: bool | None = field(init=False)

    def __post_init__(self) -> None:
        known = 0.0 if self.skip is None else host_value(self.skip)
        self.skips = None if known is None else known != 0.0

    def step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Steps the optimizer on divided gradients, unless the step is skipped.

        The kernel of a fused optimizer does both, and nothing synchronizes. For any other, one multi-tensor kernel
        divides the gradients of `parameters`, and the host synchronizes with the device once, to read the skip.
        """
        if self.divisor is None and self.skip is None:
            optimizer.step()
        elif apply.folds(optimizer):
            # On the CPU it is known to the host, and the kernel is called without `found_inf`.
            gate = torch.ones((), dtype=torch.bool, device="cpu") if self.skip is None else self.skip == 0
            apply.step_folded(optimizer, self.divisor, gate)
        else:
            self.skips = bool(self.skip) if self.skips is None else self.skips
            if self.skips:
                return
            if self.divisor is not None:
                # As in fused kernels: a product with the inverse rounds twice where the divisor is no power of two.
                values = [values_of(each, each.grad) for each in parameters if each.grad is not None]
                for group in tensor_groups(values):
                    divisor = moved(self.divisor, group.device)
                    torch._foreach_div_(group.tensors, divisor)  # pyright: ignore[reportPrivateImportUsage]
            apply.step_unfolded(optimizer)


def set_gradients(masters: Sequence[Tensor], weights: Sequence[Any], buffer: StepBuffer) -> None:
    """Sets the gradient of every master to that of its weight: the same tensor if it is float32, else a cast.

    One multi-tensor kernel casts all that need it, into `buffer`. A sparse gradient is cast separately.
    """
    to_cast: list[tuple[Tensor, Tensor]] = []
    for master, weight in zip(masters, weights, strict=True):
        if hasattr(weight.grad, "placements") and weight.grad.placements != weight.placements:
            # Each rank may hold the whole of it.
            weight.grad = weight.grad.redistribute(placements=weight.placements)
        grad = weight.grad
        if grad.layout is not torch.strided:
            master.grad = grad.float()
        elif grad.dtype is torch.float32 and local(grad).stride() == local(master).stride():
            master.grad = grad
        else:
            to_cast.append((master, grad))
    if to_cast:
        cast = buffer.like([local(master) for master, _ in to_cast])
        torch._foreach_copy_(cast, [local(grad) for _, grad in to_cast])  # pyright: ignore[reportPrivateImportUsage]
        for (master, grad), part in zip(to_cast, cast, strict=True):
            master.grad = distributed_as(grad, part)
