"""The ways to keep the low bits, by name."""

from typing import Literal, get_args

import torch

from gradscale.torch.masters.full import Full
from gradscale.torch.masters.kahan import Kahan
from gradscale.torch.masters.remainder import Remainder
from gradscale.torch.masters.stochastic import Stochastic
from gradscale.torch.masters.way import Way

Kind = Literal["fp32", "remainder", "kahan", "stochastic"]

_WAYS: dict[str, type[Way]] = {"fp32": Full, "remainder": Remainder, "kahan": Kahan, "stochastic": Stochastic}


def way_for(kind: Kind, seed: int | None) -> Way:
    """Returns the way called `kind`.

    Args:
        kind: its name.
        seed: of its random numbers; None takes one from torch's own. Only `"stochastic"` has any.
    """
    if kind not in _WAYS:
        raise ValueError(f"`kind` must be one of {', '.join(map(repr, get_args(Kind)))}. Received: kind={kind!r}.")
    if seed is not None and kind != "stochastic":
        raise ValueError(
            f"`seed` is for kind='stochastic', the only one that draws random numbers. Received: seed={seed!r} with "
            f"kind={kind!r}."
        )
    if kind == "stochastic":
        return Stochastic(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    return _WAYS[kind]()


def bytes_per_parameter(kind: Kind, *, grad_fp32: bool = False) -> int:
    """Returns what a parameter takes: the 16-bit weight, what is kept beside it, and its gradient.

    The optimizer's own state, such as the 8 bytes of Adam's two averages, comes on top, and is float32 in every kind.

    >>> {kind: bytes_per_parameter(kind) for kind in ("fp32", "remainder", "kahan", "stochastic")}
    {'fp32': 8, 'remainder': 6, 'kahan': 6, 'stochastic': 4}

    Args:
        kind: how the low bits are kept.
        grad_fp32: whether gradients are float32.
    """
    weight_bytes = 2
    return weight_bytes + _WAYS[kind].kept_bytes + (4 if grad_fp32 else 2)
