"""The losses of `GradScaler` times the scale: one, or several in lists, tuples and other iterables."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.step.host_copy import moved


def scaled(
    outputs: Any,
    scale_for: Callable[[torch.device], Tensor],
    follow: Callable[[Tensor, Tensor, Tensor], Tensor],
    copies: dict[torch.device, Tensor] | None = None,
    *,
    multiplies: bool = True,
) -> Any:
    """Returns `outputs` times the scale, FP16 tensors in float32. Does not synchronize with the device.

    Args:
        outputs: a tensor, or an iterable of tensors and further iterables.
        scale_for: returns the scale, for a loss on a device.
        follow: is called with each product, its loss and the scale that made it, and returns the product.
        copies: the scale on each device, for the losses of one iterable.
        multiplies: whether they are multiplied at all, and not left as they are because the scale is always 1.
    """
    if isinstance(outputs, Tensor):
        scale, device = scale_for(outputs.device), outputs.device
        if not multiplies:
            return follow(outputs.view_as(outputs), outputs, scale)
        # Autograd keeps the scale for the backward pass, and refuses one that `update` has written to. As in torch,
        # several losses get a copy, so that one may be differentiated after an update for another.
        if copies is not None and device not in copies:
            copies[device] = moved(scale, device).clone()
        local = moved(scale, device) if copies is None else copies[device]
        wide = outputs.float() if outputs.dtype is torch.float16 else outputs
        return follow(wide * local, wide, local)
    if not isinstance(outputs, Iterable) or isinstance(outputs, str):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    copies = {} if copies is None else copies
    each = partial(scaled, scale_for=scale_for, follow=follow, copies=copies, multiplies=multiplies)
    return type(outputs)(map(each, outputs)) if isinstance(outputs, list | tuple) else map(each, outputs)


def rescaled(grad: Tensor, made_with: Tensor, scale: Tensor) -> Tensor:
    """Returns the gradient of a scaled loss for `scale`, by which its gradients will be divided: it may have changed.

    `made_with` is the scale that the loss was multiplied by, on its device.
    """
    return grad * (moved(scale, made_with.device) / made_with)
