"""Keras on torch: one synchronization with the device, after which the rule runs on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.keras.backends import Assign, Counts, Observation, StepPlan, only_observation, single_call
from gradscale.keras.variables import on_host
from gradscale.kernels.torch import as_real, largest, norms, share_above, single, single_norm
from gradscale.kernels.torch_exponents import count_exponents
from gradscale.policies.scalars import SCALARS

# numpy scalars on the host: 0.9 times the duration of a step of Keras's class, where `keras.ops` on tensors took 1.04.
XP = SCALARS

# Keras leaves several devices to torch: there are no replicas.
agree = only_observation
merge_call = torch.compiler.disable(np.errstate(all="ignore")(single_call))


@torch.compiler.disable  # the rule runs on the host, where there is nothing to compile
@torch.no_grad()
def measure(grads: Sequence[Any], loss_finite: Any, plan: StepPlan) -> Observation:
    """Returns what is found in the gradients. Synchronizes with the device."""
    tensors = [values(grad) for grad in grads]
    device = tensors[0].device
    sizes = largest(tensors, device)
    scaled = plan.to_unscale(tensors)
    own = torch.tensor(plan.overwrites, dtype=torch.long, device=device)
    total = sizes.index_fill(0, own, 0).amax() if plan.overwrites else sizes.amax()  # torch's maximum keeps a NaN
    edge = None if plan.edge is None else torch.tensor(plan.edge, device=device)
    known = _on_host(
        total=total,
        norm=single_norm(torch.linalg.vector_norm(norms(scaled, device))) if plan.norm else None,
        upper_share=None if edge is None else share_above(scaled, edge, device),
        half_amax=sizes[list(plan.half)].amax() if plan.half else None,
        overwrites=sizes[own].amax() if plan.overwrites else None,
        bad_loss=None if loss_finite is None else ~loss_finite,
    )
    known_finite, overwrites = np.bool_(known.pop("bad_loss", 0) == 0), known.pop("overwrites", None)
    return Observation(Measurement(sizes, amax=known["total"], **known), known_finite, overwrites)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients multiplied by the factor, in float32 or wider: one call for all of them."""
    wide = [grad.float() if grad.dtype.itemsize < 4 else grad for grad in grads]
    return list(torch._foreach_mul(wide, float(factor))) if wide else []  # pyright: ignore[reportPrivateImportUsage]


def values(grad: Tensor) -> Tensor:
    """Returns the numbers of a gradient, dense or sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad.detach()


@torch.no_grad()
def counts(arrays: Sequence[Any]) -> Counts:
    """Returns tensors by the powers of two of their numbers, counted on their devices."""
    tensors = [as_real(tensor) if tensor.is_complex() else tensor for tensor in (each.detach() for each in arrays)]
    found = [count_exponents(tensor) for tensor in tensors]
    # FP8 has no kernel for a maximum.
    peaks = [largest([tensor.float() if tensor.dtype.itemsize == 1 else tensor], tensor.device) for tensor in tensors]
    return Counts(
        np.stack([each.host_counts for each in found]),
        np.array([(each.zeros, each.infs, each.nans) for each in found], np.int64),
        np.array([peak.item() for peak in peaks]),
    )


no_grad = torch.no_grad


def leaves(value: Any, dtype: str) -> list[Any]:
    """Returns the elements of a variable's value as numpy scalars. Synchronizes with the device."""
    return on_host(value, dtype)


def vector(leaves: Sequence[Any], dtype: str) -> Any:
    """Returns leaves as a vector."""
    return np.array(leaves, dtype)


def gate(applied: Any, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds."""
    del variables, assign
    if applied:
        update()


def place(value: Any) -> str:
    """Returns `<on ...>` for a tensor that is not in host memory, else nothing."""
    return f"<on {value.device}>" if isinstance(value, Tensor) and value.device.type != "cpu" else ""


def owner(value: Any) -> Any:
    """Returns None: a tensor has a value."""
    del value


def is_constant(value: Any) -> bool:
    """Returns False: a variable is read anew at each step."""
    del value
    return False


def _on_host(**found: Tensor | None) -> dict[str, Any]:
    """Returns the numbers that there are as numpy scalars: one copy for all of them."""
    there = {name: number for name, number in found.items() if number is not None}
    device = next(iter(there.values())).device
    numbers = torch.stack([single(number).to(device, torch.float32) for number in there.values()])
    return dict(zip(there, np.array(numbers.tolist(), np.float32), strict=True))
