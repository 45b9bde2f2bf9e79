"""`gradscale formats`: what each number format can hold, and what scaling it needs."""

import json
import math
from typing import Annotated, Any

import typer

from gradscale.cli._console import console, table
from gradscale.formats import FORMATS, Format

NOTES = {
    "FP32": ("master weights, optimizer state, sums", "none"),
    "TF32": ("matrix products of FP32 tensors on recent NVIDIA GPUs", "none: it has FP32's range"),
    "BF16": ("training on TPUs and recent GPUs", "none: it has FP32's range, at 8 bits of precision"),
    "FP16": (
        "training on GPUs without BF16 (V100, T4), RL fine-tuning, inference",
        "yes: one scale, for the loss",
    ),
    "FP8_E4M3": ("weights and activations of FP8 training", "yes: one scale for each tensor"),
    "FP8_E5M2": ("gradients of FP8 training", "yes: one scale for each tensor"),
    "FP4_E2M1": ("weights and activations in MXFP4 and NVFP4", "yes: one scale for each block of 16 or 32 values"),
}

EXPLANATION = """\
Normal values have full precision; below the smallest one they lose bits. A value under half of the smallest
above 0 becomes 0 and is lost. Binades are the powers of two from there to the max: the window that gradients must
fit. Loss scaling moves them up into the window, and back before the update."""


def formats(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what each number format can hold, and what loss scaling it needs."""
    if as_json:
        print(json.dumps([_as_json(known) for known in FORMATS]))
        return
    numbers = table("format", "bits", "max", "smallest normal", "smallest above 0", "binades", "overflow", prose=1)
    uses = table("format", "used for", "loss scaling", prose=2)
    for known in FORMATS:
        numbers.add_row(
            known.name,
            str(known.bits),
            f"{known.max:.0f}" if known.max < 1e6 else f"{known.max:.1e}",
            f"2^{_exponent(known.smallest_normal)}",
            f"2^{_exponent(known.smallest_subnormal)} = {known.smallest_subnormal:.1e}",
            str(known.binades),
            _overflow(known),
        )
        uses.add_row(known.name, *NOTES[known.name])
    screen = console()
    screen.print(numbers, uses)
    screen.print(EXPLANATION.replace("\n", " "))


def _as_json(known: Format) -> dict[str, Any]:
    used_for, loss_scaling = NOTES[known.name]
    return {
        "name": known.name,
        "bits": known.bits,
        "max": known.max,
        "smallest_normal": known.smallest_normal,
        "smallest_subnormal": known.smallest_subnormal,
        "binades": known.binades,
        "overflow": _overflow(known),
        "used_for": used_for,
        "loss_scaling": loss_scaling,
    }


def _exponent(power_of_two: float) -> int:
    return math.frexp(power_of_two)[1] - 1


def _overflow(known: Format) -> str:
    if known.has_inf:
        return "inf"
    return "NaN" if known.has_nan else "the max"
