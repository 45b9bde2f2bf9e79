"""`emulate`: training in any number format on any machine, with rounding to that format and float32 kernels."""

from contextlib import ContextDecorator
from typing import Any, Literal, Self, get_args

from gradscale.formats import get_format
from gradscale.torch.emulation.rounding import Rounding, UniformNumbers

__all__ = ["emulate"]

RoundingName = Literal["nearest", "stochastic"]


class emulate(ContextDecorator):
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
        ValueError: a format or `rounding` is unknown, or a seed is given without stochastic rounding.
        RuntimeError: in the block, a scripted or traced function with products is called.

    >>> import torch
    >>> weight = torch.tensor([[1 / 3]], requires_grad=True)
    >>> with emulate("e4m3", "e5m2"):
    ...     product = torch.nn.functional.linear(torch.ones(1, 1), weight)
    >>> (product * 1e-6).sum().backward()
    >>> product.item(), weight.grad.item()
    (0.34375, 0.0)
    """

    def __init__(
        self,
        format: Any,
        grad_format: Any = None,
        *,
        rounding: RoundingName = "nearest",
        saturate: bool = False,
        saturate_grads: bool = False,
        seed: int | None = None,
    ) -> None:
        if rounding not in get_args(RoundingName):
            raise ValueError(
                f"`rounding` must be one of {', '.join(get_args(RoundingName))}. Received: rounding={rounding!r}."
            )
        if seed is not None and rounding != "stochastic":
            raise ValueError(
                "`seed` is for stochastic rounding; rounding to nearest draws nothing. "
                f"Received: seed={seed!r}, rounding={rounding!r}. Leave it out, or pass rounding='stochastic'."
            )
        random = UniformNumbers(seed) if rounding == "stochastic" else None
        self._values = Rounding(get_format(format), saturate, random)
        self._grads = Rounding(get_format(format if grad_format is None else grad_format), saturate_grads, random)

    def __enter__(self) -> Self:
        # Importing the mode loads torch's compiler, to exclude the mode from it, which takes a second.
        from gradscale.torch.emulation.mode import EmulationMode

        # A new mode for each entry, so that one `emulate` can decorate functions that call each other, in any thread.
        EmulationMode(self._values, self._grads).__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        from gradscale.torch.emulation.mode import MODES

        MODES.items[-1].__exit__(*exception)
