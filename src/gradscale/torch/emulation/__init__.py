"""`emulate`: training in any number format on any machine, with rounding to that format and float32 kernels."""

from typing import TYPE_CHECKING, Any, Literal

from gradscale.formats import get_format
from gradscale.kernels.torch_rounding import Rounding, UniformNumbers

if TYPE_CHECKING:
    from gradscale.torch.emulation.mode import EmulationMode

__all__ = ["emulate"]


def emulate(
    format: Any,
    grad_format: Any = None,
    *,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    saturate: bool = False,
    saturate_grads: bool = False,
    seed: int | None = None,
) -> "EmulationMode":
    """Runs a model as if its products were computed in another number format. A block, or a decorator.

    Operands and results of matrix products, convolutions, attention, recurrent layers and embeddings are rounded to
    `format`, with sums in float32, as on tensor cores. Gradients are rounded to `grad_format` wherever values are, and
    vanish or overflow there. Parameters and their gradients stay float32 tensors. In FP16 and BF16 the results of other
    functions are rounded too, unless they are on autocast's float32 list; in other formats they are float32.

    `out`, and the target of a product in place, are rounded like any result. Only float32 tensors are emulated; float64
    and FP16 tensors are computed as usual. The innermost block of a thread takes precedence. The backward pass may be
    run outside. Does not synchronize with the device.

    A checkpointed function must be decorated, so that it is emulated when it is recomputed; torch raises an error
    otherwise: `checkpoint(emulate("fp16")(block), x, use_reentrant=False)`.

    Args:
        format: of values, as a `Format`, a name or a dtype.
        grad_format: of gradients; `format` if None.
        rounding: `"nearest"`, ties to even, or `"stochastic"`, which keeps the mean.
        saturate: clamp values to the largest number. Else larger values become inf, or NaN where the format has no inf.
        saturate_grads: the same for gradients. A scaler detects no overflow then.
        seed: of random numbers of its own for stochastic rounding; None uses torch's.

    Raises:
        ValueError: a format or `rounding` is unknown.

    >>> import torch
    >>> weight = torch.tensor([[1 / 3]], requires_grad=True)
    >>> with emulate("e4m3", "e5m2"):
    ...     product = torch.nn.functional.linear(torch.ones(1, 1), weight)
    >>> (product * 1e-6).sum().backward()
    >>> product.item(), weight.grad.item()
    (0.34375, 0.0)
    """
    # Importing the mode loads torch's compiler, to exclude the mode from it, which takes a second.
    from gradscale.torch.emulation.mode import EmulationMode

    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"`rounding` must be one of nearest, stochastic. Received: rounding={rounding!r}.")
    random = UniformNumbers(seed) if rounding == "stochastic" else None
    values = Rounding(get_format(format), saturate, random)
    grads = Rounding(get_format(format if grad_format is None else grad_format), saturate_grads, random)
    return EmulationMode(values, grads)
