"""The table of updates: gradient arrays in, the update out. Written by hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradscale import CheckOnly, Dynamic, Headroom, NoScaling, Policy, Static, Status, preset

Values = Mapping[str, list[Any]]

LR = 0.5


@dataclass(frozen=True)
class Update:
    """A step: scaled gradients in, and the update that follows.

    Attributes:
        grads: scaled gradients by parameter; a parameter may be left out.
        status: the status of the step.
        factor: what the gradients are multiplied by.
        applied: the gradients that are applied, or None.
        params: the parameters after `param -= LR * grad`.
        norm: the norm, unscaled, where `clip_norm` is given.
        clip_norm: bound on the norm.
        loss: the unscaled loss.
    """

    grads: Values
    status: Status
    factor: float
    applied: Values | None
    params: Values
    norm: float | None = None
    clip_norm: float | None = None
    loss: float = 1.0


@dataclass(frozen=True)
class UpdateCase:
    """A policy, parameters and the steps they go through. `dtype` is the type of the gradients."""

    name: str
    policy: Policy
    params: Values
    steps: tuple[Update, ...]
    dtype: str = field(default="float32")


APPLIED, OVERFLOW = Status.APPLIED, Status.OVERFLOW
NONFINITE_LOSS, NO_GRADS = Status.NONFINITE_LOSS, Status.NO_GRADS

UPDATE_CASES = (
    UpdateCase(
        "gradients are divided by the scale and applied",
        Static(1024.0),
        {"weight": [1.0, 2.0], "bias": [0.0]},
        (
            Update(
                grads={"weight": [1024.0, -512.0], "bias": [256.0]},
                status=APPLIED,
                factor=2.0**-10,
                applied={"weight": [1.0, -0.5], "bias": [0.25]},
                params={"weight": [0.5, 2.25], "bias": [-0.125]},
            ),
            Update(
                grads={"weight": [1024.0, 1024.0], "bias": [0.0]},
                status=APPLIED,
                factor=2.0**-10,
                applied={"weight": [1.0, 1.0], "bias": [0.0]},
                params={"weight": [0.0, 1.75], "bias": [-0.125]},
            ),
        ),
    ),
    UpdateCase(
        "one inf in one array skips the update of all, and the next gradients are divided by the lower scale",
        Dynamic(init_scale=8.0),
        {"weight": [1.0, 2.0], "bias": [4.0]},
        (
            Update(
                grads={"weight": [8.0, 8.0], "bias": [math.inf]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [1.0, 2.0], "bias": [4.0]},
            ),
            Update(
                grads={"weight": [4.0, 8.0], "bias": [-4.0]},
                status=APPLIED,
                factor=0.25,
                applied={"weight": [1.0, 2.0], "bias": [-1.0]},
                params={"weight": [0.5, 1.0], "bias": [4.5]},
            ),
        ),
    ),
    UpdateCase(
        "the scale that made the gradients divides them, also in the step that makes it grow",
        Dynamic(init_scale=8.0, growth_interval=1),
        {"weight": [0.0]},
        (
            Update(
                grads={"weight": [8.0]},
                status=APPLIED,
                factor=0.125,
                applied={"weight": [1.0]},
                params={"weight": [-0.5]},
            ),
            Update(
                grads={"weight": [16.0]},
                status=APPLIED,
                factor=0.0625,
                applied={"weight": [1.0]},
                params={"weight": [-1.0]},
            ),
        ),
    ),
    UpdateCase(
        "a NaN skips the update",
        Static(2.0),
        {"weight": [1.0, 1.0]},
        (
            Update(
                grads={"weight": [math.nan, 2.0]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [1.0, 1.0]},
            ),
        ),
    ),
    UpdateCase(
        "a loss that is not finite skips the update, whatever the gradients",
        Static(2.0),
        {"weight": [1.0, 1.0]},
        (
            Update(
                grads={"weight": [2.0, 2.0]},
                loss=math.inf,
                status=NONFINITE_LOSS,
                factor=0.0,
                applied=None,
                params={"weight": [1.0, 1.0]},
            ),
            Update(
                grads={"weight": [2.0, 2.0]},
                status=APPLIED,
                factor=0.5,
                applied={"weight": [1.0, 1.0]},
                params={"weight": [0.5, 0.5]},
            ),
        ),
    ),
    UpdateCase(
        "the norm over all arrays is clipped unscaled, by the same factor that unscales",
        Static(8.0),
        {"weight": [0.0], "bias": [0.0]},
        (
            Update(
                grads={"weight": [24.0], "bias": [32.0]},
                clip_norm=2.5,
                norm=5.0,
                status=APPLIED,
                factor=0.0625,
                applied={"weight": [1.5], "bias": [2.0]},
                params={"weight": [-0.75], "bias": [-1.0]},
            ),
        ),
    ),
    UpdateCase(
        "a norm within the bound is not clipped",
        Static(8.0),
        {"weight": [0.0], "bias": [0.0]},
        (
            Update(
                grads={"weight": [24.0], "bias": [32.0]},
                clip_norm=6.0,
                norm=5.0,
                status=APPLIED,
                factor=0.125,
                applied={"weight": [3.0], "bias": [4.0]},
                params={"weight": [-1.5], "bias": [-2.0]},
            ),
        ),
    ),
    UpdateCase(
        "an overflow is skipped, not clipped",
        Static(8.0),
        {"weight": [1.0], "bias": [1.0]},
        (
            Update(
                grads={"weight": [-math.inf], "bias": [8.0]},
                clip_norm=1.0,
                norm=math.inf,
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [1.0], "bias": [1.0]},
            ),
        ),
    ),
    UpdateCase(
        "gradients that are finite only while scaled are an overflow",
        Static(2.0**-100),
        {"weight": [1.0, 1.0]},
        (
            Update(
                grads={"weight": [1e20, 0.0]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [1.0, 1.0]},
            ),
        ),
    ),
    UpdateCase(
        "the lowest scale of all divides the gradients after an overflow there",
        preset("torch", init_scale=2.0**-126),
        {"weight": [1.0, 2.0]},
        (
            Update(
                grads={"weight": [math.inf, 0.0]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [1.0, 2.0]},
            ),
            Update(
                grads={"weight": [2.0**-126, 0.0]},
                status=APPLIED,
                factor=2.0**126,
                applied={"weight": [1.0, 0.0]},
                params={"weight": [0.5, 2.0]},
            ),
        ),
    ),
    UpdateCase(
        "a parameter without a gradient stays as it is",
        Static(2.0),
        {"weight": [1.0], "frozen": [7.0]},
        (
            Update(
                grads={"weight": [4.0]},
                status=APPLIED,
                factor=0.5,
                applied={"weight": [2.0]},
                params={"weight": [0.0], "frozen": [7.0]},
            ),
        ),
    ),
    UpdateCase(
        "no gradients at all apply nothing",
        Dynamic(init_scale=2.0),
        {"weight": [1.0]},
        (Update(grads={}, status=NO_GRADS, factor=0.0, applied=None, params={"weight": [1.0]}),),
    ),
    UpdateCase(
        "an array without elements is applied like any other",
        Static(2.0),
        {"weight": [1.0], "empty": []},
        (
            Update(
                grads={"weight": [2.0], "empty": []},
                clip_norm=8.0,
                norm=1.0,
                status=APPLIED,
                factor=0.5,
                applied={"weight": [1.0], "empty": []},
                params={"weight": [0.5], "empty": []},
            ),
        ),
    ),
    UpdateCase(
        "gradients of zero are applied",
        Dynamic(init_scale=4.0, growth_interval=1),
        {"weight": [1.0]},
        (
            Update(
                grads={"weight": [0.0]},
                clip_norm=1.0,
                norm=0.0,
                status=APPLIED,
                factor=0.25,
                applied={"weight": [0.0]},
                params={"weight": [1.0]},
            ),
        ),
    ),
    UpdateCase(
        "a check alone applies gradients as they are, or not at all",
        CheckOnly(),
        {"weight": [1.0, 2.0], "bias": [0.0]},
        (
            Update(
                grads={"weight": [0.5, -3.0], "bias": [2.0**-100]},
                status=APPLIED,
                factor=1.0,
                applied={"weight": [0.5, -3.0], "bias": [2.0**-100]},
                params={"weight": [0.75, 3.5], "bias": [-(2.0**-101)]},
            ),
            Update(
                grads={"weight": [1.0, math.nan], "bias": [1.0]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [0.75, 3.5], "bias": [-(2.0**-101)]},
            ),
            Update(
                grads={"weight": [6.0, -8.0], "bias": [0.0]},
                clip_norm=5.0,
                norm=10.0,
                status=APPLIED,
                factor=0.5,
                applied={"weight": [3.0, -4.0], "bias": [0.0]},
                params={"weight": [-0.75, 5.5], "bias": [-(2.0**-101)]},
            ),
        ),
    ),
    UpdateCase(
        "no scaling clips what it is given",
        NoScaling(),
        {"weight": [0.0, 0.0]},
        (
            Update(
                grads={"weight": [6.0, -8.0]},
                clip_norm=5.0,
                norm=10.0,
                status=APPLIED,
                factor=0.5,
                applied={"weight": [3.0, -4.0]},
                params={"weight": [-1.5, 2.0]},
            ),
        ),
    ),
    UpdateCase(
        # As `torch.nn.utils.clip_grad_norm_`: every gradient times 1 / inf. Nothing is checked, and nothing is skipped.
        "no scaling clips by an infinite norm too",
        NoScaling(),
        {"weight": [0.0, 1.0]},
        (
            Update(
                grads={"weight": [math.inf, 8.0]},
                clip_norm=5.0,
                norm=math.inf,
                status=APPLIED,
                factor=0.0,
                applied={"weight": [math.nan, 0.0]},
                params={"weight": [math.nan, 1.0]},
            ),
        ),
    ),
    UpdateCase(
        "float16 gradients are unscaled in float32, below all that float16 can hold",
        Static(65536.0),
        {"weight": [0.0, 0.0]},
        (
            Update(
                grads={"weight": [2.0**-24, 65504.0]},
                status=APPLIED,
                factor=2.0**-16,
                applied={"weight": [2.0**-40, 0.99951171875]},
                params={"weight": [-(2.0**-41), -0.499755859375]},
            ),
        ),
        dtype="float16",
    ),
    UpdateCase(
        "squares of float16 gradients do not overflow the norm",
        Static(1024.0),
        {"weight": [0.0, 0.0]},
        (
            Update(
                grads={"weight": [3072.0, 4096.0]},
                clip_norm=10.0,
                norm=5.0,
                status=APPLIED,
                factor=2.0**-10,
                applied={"weight": [3.0, 4.0]},
                params={"weight": [-1.5, -2.0]},
            ),
        ),
        dtype="float16",
    ),
    UpdateCase(
        "bfloat16 gradients are unscaled in float32",
        Static(256.0),
        {"weight": [0.0]},
        (
            Update(
                grads={"weight": [1.0078125]},
                status=APPLIED,
                factor=2.0**-8,
                applied={"weight": [0.003936767578125]},
                params={"weight": [-0.0019683837890625]},
            ),
        ),
        dtype="bfloat16",
    ),
    UpdateCase(
        "float64 gradients keep their digits",
        Static(2.0),
        {"weight": [0.0]},
        (
            Update(
                grads={"weight": [2.0 + 2.0**-40]},
                status=APPLIED,
                factor=0.5,
                applied={"weight": [1.0 + 2.0**-41]},
                params={"weight": [-0.5 - 2.0**-42]},
            ),
        ),
        dtype="float64",
    ),
    UpdateCase(
        "float64 gradients that do not fit float32 are applied, at every step",
        Static(2.0),
        {"weight": [1.0, 1.0]},
        tuple(
            Update(
                grads={"weight": [2.0**200, 2.0]},
                status=APPLIED,
                factor=0.5,
                applied={"weight": [2.0**199, 1.0]},
                params={"weight": [-(2.0**198) * (step + 1), 0.5 - 0.5 * step]},
            )
            for step in range(2)
        ),
        dtype="float64",
    ),
    UpdateCase(
        "float64 gradients that do not fit float32 lower a scale that follows them",
        Headroom(init_scale=2.0**16),
        {"weight": [0.0, 1.0]},
        (
            Update(
                grads={"weight": [2.0**200, 0.0]},
                status=APPLIED,
                factor=2.0**-16,
                applied={"weight": [2.0**184, 0.0]},
                params={"weight": [-(2.0**183), 1.0]},
            ),
            Update(
                grads={"weight": [0.0, 2.0**-24]},
                status=APPLIED,
                factor=2.0**24,
                applied={"weight": [0.0, 1.0]},
                params={"weight": [-(2.0**183), 0.5]},
            ),
        ),
        dtype="float64",
    ),
    *(
        UpdateCase(
            f"a norm whose square does not fit float32 is an overflow where gradients are {dtype}",
            Static(2.0),
            {"weight": [1.0, 1.0]},
            (
                Update(
                    grads={"weight": [2.0**70, 1.0]},
                    clip_norm=1.0,
                    norm=math.inf,
                    status=OVERFLOW,
                    factor=0.0,
                    applied=None,
                    params={"weight": [1.0, 1.0]},
                ),
            ),
            dtype=dtype,
        )
        for dtype in ("float32", "float64")
    ),
    UpdateCase(
        "complex gradients count as their real and imaginary parts",
        Static(2.0),
        {"weight": [0.0 + 0.0j]},
        (
            Update(
                grads={"weight": [complex(1.0, math.inf)]},
                status=OVERFLOW,
                factor=0.0,
                applied=None,
                params={"weight": [0.0 + 0.0j]},
            ),
            Update(
                grads={"weight": [6.0 + 8.0j]},
                clip_norm=2.5,
                norm=5.0,
                status=APPLIED,
                factor=0.25,
                applied={"weight": [1.5 + 2.0j]},
                params={"weight": [-0.75 - 1.0j]},
            ),
        ),
        dtype="complex64",
    ),
)
