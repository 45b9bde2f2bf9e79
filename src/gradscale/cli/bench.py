"""`gradscale bench`: the cost of a step with loss scaling on this machine, torch's scaler, and no scaling."""

import json
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gradscale._extras import require
from gradscale.cli._console import console, counted, fail, table, usage_errors
from gradscale.peers.specs import parse_policy

if TYPE_CHECKING:
    from gradscale.bench.compare import Measured
    from gradscale.bench.steps import Case

CLIP = 1.0
PARAMETERS = "10M"
TENSORS = 64

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}

LEGEND = (
    "ms: the median; the sides take turns. vs torch: the ratio of the medians, then the quartiles of the ratios within "
    "a round. read, written: passes over the memory of the gradients, the update's own included. syncs: "
    "synchronizations with the device, beyond those of the step without scaling."
)


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="MODULE:FUNCTION; the function returns a torch.nn.Module, or parameters. Their shapes are measured, "
            "in float32.",
            show_default=False,
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Size of a made-up model, as in 300k or 1.5B.", show_default=PARAMETERS)
    ] = None,
    tensors: Annotated[
        int | None, typer.Option(min=1, help="Tensors of a made-up model.", show_default=str(TENSORS))
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd, adagrad, or MODULE:FUNCTION, which takes parameters.")
    ] = "adamw",
    implementation: Annotated[
        str | None, typer.Option(help="fused, foreach or for-loop.", show_default="fused")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="Clip to this norm.", show_default=f"both {CLIP} and --no-clip")
    ] = None,
    no_clip: Annotated[bool, typer.Option("--no-clip", help="Do not clip.")] = False,
    device: Annotated[
        str | None, typer.Option(help="As in cpu, cuda or cuda:1.", show_default="the accelerator, else cpu")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Steps of each side that are timed.")] = 15,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Policy of LossScaler; `gradscale policies` lists the names.")
    ] = "dynamic",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the memory that each step takes.")] = False,
) -> None:
    """Measure the cost of a step on this machine: with torch's scaler, with gradscale's, and with none.

    Example: gradscale bench --parameters 25M --tensors 160 --optimizer sgd --clip 1.0
    """
    with usage_errors():
        require("The benchmark", "torch", extra="torch")
        rule, clips, size = parse_policy(policy), _clips(clip, no_clip), _size(model, parameters, tensors)
    from gradscale.bench.compare import compare
    from gradscale.bench.targets import BadTarget, use_threads

    use_threads(threads)
    try:
        cases = _cases(size if model is None else model, optimizer, implementation, clips, device)
        with console().status("measuring"):
            measured = [compare(case, rule, repeats) for case in cases]
    except BadTarget as error:
        fail(str(error))
    if as_json:
        print(json.dumps({"policy": policy, "repeats": repeats, **_as_json(cases, measured)}))
    else:
        _show(cases, measured)


def _clips(clip: float | None, no_clip: bool) -> Sequence[float | None]:
    """Returns the bounds to measure with: those of the options, or both without options."""
    if clip is not None and not clip > 0:
        raise ValueError(f"`--clip` must be greater than 0. Received: {clip}. Without clipping: --no-clip.")
    if clip is not None and no_clip:
        raise ValueError("`--clip` and `--no-clip` exclude each other. Received: both. Leave out one of them, or both.")
    if no_clip:
        return [None]
    return [CLIP, None] if clip is None else [clip]


def _size(model: str | None, parameters: str | None, tensors: int | None) -> tuple[int, int]:
    """Returns how many parameters, in how many tensors, a made-up model has."""
    if model is not None and (parameters is not None or tensors is not None):
        raise ValueError("`--model` has parameters and tensors of its own. Leave out --parameters and --tensors.")
    text = PARAMETERS if parameters is None else parameters
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text, re.IGNORECASE)
    if not parsed:
        raise ValueError(f"`--parameters` must be a number, as in 300k, 25M or 1.5B. Received: {text!r}.")
    return round(float(parsed[1]) * UNITS[parsed[2].lower()]), tensors or TENSORS


def _cases(
    model: str | tuple[int, int],
    optimizer: str,
    implementation: str | None,
    clips: Sequence[float | None],
    device: str | None,
) -> "list[Case]":
    """Returns the cases that the options describe."""
    from gradscale.bench.steps import Case
    from gradscale.bench.targets import device_of, made_up_shapes, optimizer_of, shapes_of

    place = device_of(device)
    called, make = optimizer_of(optimizer, implementation, place)
    shapes = shapes_of(model) if isinstance(model, str) else made_up_shapes(*model)
    names = [f"{called}, {'no clip' if clip is None else f'clip {clip:g}'}" for clip in clips]
    return [Case(name, shapes, make, clip, place) for name, clip in zip(names, clips, strict=True)]


def _show(cases: "Sequence[Case]", measured: "Sequence[Sequence[Measured]]") -> None:
    """Prints a table for each case."""
    screen = console()
    about = SimpleNamespace(**_about(cases[0]))
    screen.print(f"{about.device}, {counted(about.threads, 'CPU thread')}, torch {about.torch}, {about.machine}")
    screen.print(f"{counted(about.parameters, 'parameter')} in {counted(about.tensors, 'tensor')}")
    for case, sides in zip(cases, measured, strict=True):
        rows = table("side", "ms", "vs torch", "quartiles", "read", "written", "syncs")
        for side in sides:
            low, high = side.quartiles
            ratios = (f"{side.times_torch:.2f}", f"{low:.2f}-{high:.2f}")
            passes = (f"{side.passes_read:.1f}", f"{side.passes_written:.1f}")
            rows.add_row(side.side, f"{side.median_ms:.3g}", *ratios, *passes, str(side.host_reads))
        screen.print(f"\n{escape(case.name)}", rows)
    screen.print(LEGEND)


def _as_json(cases: "Sequence[Case]", measured: "Sequence[Sequence[Measured]]") -> dict[str, Any]:
    """Returns everything that was measured."""
    listed = [
        {"case": case.name, "clip": case.clip, "sides": [asdict(side) for side in sides]}
        for case, sides in zip(cases, measured, strict=True)
    ]
    return {**_about(cases[0]), "cases": listed}


def _about(case: "Case") -> dict[str, Any]:
    """Returns what was measured, and on what."""
    import torch

    return {
        "device": case.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "parameters": sum(map(math.prod, case.shapes)),
        "tensors": len(case.shapes),
    }
