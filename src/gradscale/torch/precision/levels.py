"""`Precision`, the settings of mixed-precision training, and the opt levels O0 to O3 of apex."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.static import NoScaling
from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.masters import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How `prepare` trains a model: start from a level and change fields with `dataclasses.replace`.

        precision = replace(O2, compute=torch.bfloat16, master_weights="remainder")

    A `compute` that contradicts the rest is rejected when the value is built.

    Attributes:
        compute: dtype of matrix products and convolutions: `torch.float32`, `torch.float16` or `torch.bfloat16`.
        autocast: whether the model runs under `torch.autocast`, which picks a precision for each operation.
        half_weights: whether weights and buffers are stored in `compute` as well, and gradients with them.
        keep_norm_fp32: whether norm layers keep float32 weights and statistics, and compute in float32.
        keep_fp32: modules that stay float32 with all their submodules: name patterns, as `fnmatch` reads them, or
            types.
        master_weights: the `storage` of `MasterWeights`, which keeps the low bits of half weights; None loses them.
        policy: the scaling policy, or its name. `"auto"` is `Headroom()` for FP16, whose gradients vanish and overflow,
            and `NoScaling()` for BF16 and FP32, which have the range.
        output: dtype that outputs of the model are cast to; None leaves them as they are.
    """

    compute: torch.dtype
    autocast: bool = False
    half_weights: bool = False
    keep_norm_fp32: bool = True
    keep_fp32: tuple[str | type[nn.Module], ...] = ()
    master_weights: Storage | None = None
    policy: Policy | str = "auto"
    output: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        is_half = self.autocast or self.half_weights
        if self.compute not in (torch.float32, *HALF_DTYPES):
            raise ValueError(
                "`compute` must be torch.float32, torch.float16 or torch.bfloat16. "
                f"Received: compute={self.compute!r}. For other formats use `gradscale.torch.emulate`."
            )
        if not isinstance(self.keep_fp32, tuple):
            raise TypeError(
                "`keep_fp32` must be a tuple of name patterns and module types. "
                f"Received: keep_fp32={self.keep_fp32!r}. A single one is written as `keep_fp32=('head',)`."
            )
        if is_half and self.compute is torch.float32:
            raise ValueError(
                "`autocast` and `half_weights` make a model run in half precision, and `compute` is float32. "
                f"Received: autocast={self.autocast}, half_weights={self.half_weights}. "
                "Set `compute` to torch.float16 or torch.bfloat16, or start from `O0`."
            )
        if not is_half and self.compute is not torch.float32:
            raise ValueError(
                "A model runs in half precision by `autocast` or by `half_weights`. "
                f"Received: compute={self.compute} with neither. Set one of them, or start from `O1` or `O2`."
            )
        if self.policy != "auto":
            object.__setattr__(self, "policy", as_policy(self.policy))

    def scaling(self) -> Policy | str:
        """Returns the policy for `LossScaler`: with `"auto"`, none but for FP16."""
        return NoScaling() if self.policy == "auto" and self.compute is not torch.float16 else self.policy


O0 = Precision(compute=torch.float32)
"""Float32 throughout: the baseline to compare with."""

O1 = Precision(compute=torch.float16, autocast=True)
"""Float32 weights under `torch.autocast`: the safe choice."""

O2 = Precision(compute=torch.float16, half_weights=True, master_weights="fp32")
"""Half weights, activations and gradients, with float32 norms and float32 master weights."""

O3 = Precision(compute=torch.float16, half_weights=True, keep_norm_fp32=False)
"""Half throughout: the most that half precision saves, and the most that it costs."""

LEVELS = {"O0": O0, "O1": O1, "O2": O2, "O3": O3}
LEVELS |= {f"{name}-bf16": replace(LEVELS[name], compute=torch.bfloat16) for name in ("O1", "O2", "O3")}
LEVELS |= {"fp32": O0, "fp16": O1, "bf16": LEVELS["O1-bf16"]}
"""Every level by name."""


def as_precision(precision: Precision | str) -> Precision:
    """Returns the precision that a name stands for, or the one given."""
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in LEVELS:
        return LEVELS[precision]
    known = ", ".join(map(repr, LEVELS))
    raise ValueError(f"`precision` must be a `Precision` or one of {known}. Received: precision={precision!r}.")
