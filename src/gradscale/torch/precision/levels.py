"""`Precision`, the settings of mixed-precision training, and the opt levels O0 to O3 of apex."""

from dataclasses import dataclass, replace
from typing import Any, get_args

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

    Fields that contradict each other are rejected when the value is built.

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
        _check_fields(self)
        _check_together(self)
        if self.policy != "auto":
            object.__setattr__(self, "policy", as_policy(self.policy))

    def scaling(self) -> Policy | str:
        """Returns the policy for `LossScaler`.

        >>> O1.scaling(), replace(O1, compute=torch.bfloat16).scaling()
        ('auto', NoScaling())
        """
        if self.policy == "auto" and self.compute is not torch.float16:
            return NoScaling()
        return self.policy


def _check_fields(precision: Any) -> None:
    """Raises if one of the fields has a wrong type or value."""

    def check(name: str, right: bool, rule: str, fix: str = "", error: type[Exception] = ValueError) -> None:
        if not right:
            raise error(f"`{name}` must be {rule}. Received: {name}={getattr(precision, name)!r}.{fix}")

    for flag in ("autocast", "half_weights", "keep_norm_fp32"):
        check(flag, isinstance(getattr(precision, flag), bool), "True or False", error=TypeError)
    fix = " For other formats use `gradscale.torch.emulate`."
    computes = precision.compute in (torch.float32, *HALF_DTYPES)
    check("compute", computes, "torch.float32, torch.float16 or torch.bfloat16", fix)
    rule = f"None or one of {', '.join(map(repr, get_args(Storage)))}"
    check("master_weights", precision.master_weights in (None, *get_args(Storage)), rule)
    rule = "a floating-point dtype, or None to leave the outputs of the model as they are"
    output = precision.output
    check("output", output is None or (isinstance(output, torch.dtype) and output.is_floating_point), rule)
    rule, fix = "a tuple of name patterns and module types", " A single one is written as `keep_fp32=('head',)`."
    check("keep_fp32", isinstance(precision.keep_fp32, tuple), rule, fix, TypeError)
    for entry in precision.keep_fp32:
        if not (isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))):
            raise TypeError(
                "`keep_fp32` takes patterns of module names, such as 'blocks.*.router', and types of modules. "
                f"Received: {entry!r}."
            )


def _check_together(precision: Precision) -> None:
    """Raises if two fields contradict each other."""
    compute, masters, half_weights = precision.compute, precision.master_weights, precision.half_weights
    makes_half = precision.autocast or half_weights
    if compute is torch.float32 and makes_half:
        raise ValueError(
            "`autocast` and `half_weights` make a model run in half precision, and `compute` is float32. "
            f"Received: autocast={precision.autocast}, half_weights={half_weights}. "
            "Set `compute` to torch.float16 or torch.bfloat16, or start from `O0`."
        )
    if compute is not torch.float32 and not makes_half:
        raise ValueError(
            "A model runs in half precision by `autocast` or by `half_weights`. "
            f"Received: compute={compute} with neither. Set one of them, or start from `O1` or `O2`."
        )
    if masters is not None and not half_weights:
        raise ValueError(
            "`master_weights` keep the low bits of half weights, and these weights stay float32. "
            f"Received: master_weights={masters!r}, half_weights=False. Leave them out, or start from `O2`."
        )
    if not precision.keep_norm_fp32 and not half_weights:
        raise ValueError(
            "`keep_norm_fp32=False` stores norm layers in half precision as all other weights are, and these weights "
            "stay float32. Received: half_weights=False. Leave it out, or start from `O3`."
        )


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
    """Returns the precision that a name stands for, or the one given.

    >>> as_precision("O2-bf16").compute
    torch.bfloat16
    """
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in LEVELS:
        return LEVELS[precision]
    known = ", ".join(map(repr, LEVELS))
    raise ValueError(f"`precision` must be a `Precision` or one of {known}. Received: precision={precision!r}.")
