"""The cost of a step with loss scaling on this machine, beside torch's scaler and no scaling.

Command:  python -m benchmarks.step --parameters 25M --tensors 160 --optimizer sgd --clip 1.0

Measures your own shapes and optimizer, too: `--model MODULE:FUNCTION`, `--optimizer MODULE:FUNCTION`.
"""

import argparse
import json
import math
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.sides import BARE, TORCH, Case, all_sides
from benchmarks.traffic import Traffic, count
from benchmarks.turns import ratio, ratio_quartiles, take_turns
from torch import Tensor, nn

from gradscale import Policy
from gradscale.checkup.targets import BadTarget, device_of, load_function
from gradscale.peers.specs import parse_policy

Optimizer = torch.optim.Optimizer
Shapes = list[tuple[int, ...]]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""The keywords by which torch's optimizers choose the kernels of their update."""

CLIP = 1.0
PARAMETERS = "10M"
TENSORS = 64

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}

ROW = "{:<20}{:>8}{:>10}{:>12}{:>6}{:>9}{:>7}"

LEGEND = """\
ms: the median; the sides take turns. vs torch: the ratio of the medians, then
the quartiles of the ratios within a round. read, written: passes over the
memory of the gradients, the update's own included. syncs: synchronizations
with the device, beyond those of the step without scaling."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of one side's step.

    Attributes:
        side: name of the side.
        median_ms: the median of its times.
        times_torch: that median over the median of torch's scaler.
        quartiles: of the ratios to torch's scaler in the same round.
        passes_read: how often the gradients are read.
        passes_written: how often the gradients are written.
        host_reads: synchronizations with the device, beyond those of the optimizer and the clip by themselves.
        peak_allocated: the most bytes that new tensors take at one time.
    """

    side: str
    median_ms: float
    times_torch: float
    quartiles: tuple[float, float]
    passes_read: float
    passes_written: float
    host_reads: int
    peak_allocated: int


def compare(case: Case, policy: Policy, repeats: int) -> list[Measured]:
    """Returns the cost of every side, each timed `repeats` times, at least twice. `policy` is that of `LossScaler`."""
    sides = all_sides(case, policy)
    seconds = take_turns(sides, repeats)
    # Counted after the timing: a dispatch mode makes every operator slower.
    traffic = {name: count(side) for name, side in sides.items()}
    own_reads = len(traffic[BARE].host_reads)
    return [_measured(name, seconds[name], seconds[TORCH], traffic[name], own_reads) for name in sides]


def _measured(name: str, seconds: list[float], torchs: list[float], traffic: Traffic, own_reads: int) -> Measured:
    return Measured(
        side=name,
        median_ms=statistics.median(seconds) * 1e3,
        times_torch=ratio(seconds, torchs),
        quartiles=ratio_quartiles(seconds, torchs),
        passes_read=traffic.passes_read,
        passes_written=traffic.passes_written,
        host_reads=len(traffic.host_reads) - own_reads,
        peak_allocated=traffic.peak_allocated,
    )


def shapes_of(factory: str) -> Shapes:
    """Returns the shapes of the trained parameters of a model.

    Args:
        factory: `module:function`; the function takes no arguments, and returns a module or an iterable of parameters.
    """
    made = load_function("--model", factory)()
    parameters: Any = made.parameters() if isinstance(made, nn.Module) else made
    # A tensor is iterable too, over its rows.
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    given: list[Any] = list(parameters) if several else [parameters]
    if unknown := [type(item).__name__ for item in given if not isinstance(item, Tensor)]:
        raise BadTarget(
            "The function of `--model` must return a torch.nn.Module or an iterable of parameters. "
            f"Received: {unknown[0]} from {factory}."
        )
    trained = {id(parameter): tuple(parameter.shape) for parameter in given if parameter.requires_grad}
    if not any(map(math.prod, trained.values())):
        raise BadTarget(f"The model must have parameters that require gradients. Received: none from {factory}.")
    return list(trained.values())


def made_up_shapes(parameters: int, tensors: int) -> Shapes:
    """Returns the shapes of `tensors` flat tensors, as nearly equal as can be, that hold `parameters` in all.

    >>> made_up_shapes(10, 3)
    [(4,), (3,), (3,)]
    """
    if not 1 <= tensors <= parameters:
        raise BadTarget(
            "`--tensors` must lie between 1 and the number of parameters, so that none is empty. "
            f"Received: {tensors} tensors for {parameters} parameters."
        )
    size, rest = divmod(parameters, tensors)
    return [(size + (index < rest),) for index in range(tensors)]


def optimizer_of(
    name: str, implementation: str | None, device: str = "cpu"
) -> tuple[str, Callable[[list[Tensor]], Optimizer]]:
    """Returns the name of an optimizer in tables, and a function that makes it.

    Args:
        name: one of `OPTIMIZERS`, or the `module:function` of one that takes parameters.
        implementation: one of `IMPLEMENTATIONS`, for the first; by default the fused one.
        device: device of the parameters.
    """
    if name not in OPTIMIZERS:
        if implementation is not None:
            raise BadTarget(
                f"`--implementation` is for {', '.join(OPTIMIZERS)}: a function chooses its own. "
                f"Received: {implementation} with --optimizer {name}. Leave it out."
            )
        return name, partial(_make_own, name, load_function("--optimizer", name, others=OPTIMIZERS))
    implementation = "fused" if implementation is None else implementation
    if implementation not in IMPLEMENTATIONS:
        raise BadTarget(
            f"`--implementation` must be one of {', '.join(IMPLEMENTATIONS)}. Received: {implementation!r}."
        )
    make = partial(OPTIMIZERS[name], lr=1e-3, **IMPLEMENTATIONS[implementation])
    _check_kernels(f"{name} {implementation}", make, device)
    return f"{name} {implementation}", make


def _check_kernels(called: str, make: Callable[[list[Tensor]], Optimizer], device: str) -> None:
    """Raises if torch has no such optimizer for a device, which it reports only at the first step."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        make([parameter]).step()
    except RuntimeError as error:
        raise BadTarget(
            f"`--implementation` must be one that torch has for the optimizer on {device}. Received: {called}: {error}"
        ) from error


def _make_own(path: str, make: Callable[..., Any], parameters: list[Tensor]) -> Optimizer:
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise BadTarget(
            "The function of `--optimizer` must return a torch.optim.Optimizer. "
            f"Received: {type(made).__name__} from {path}."
        )
    return made


def _clips(clip: float | None, no_clip: bool) -> Sequence[float | None]:
    """Returns the bounds to measure with: those of the options, or both without options."""
    if clip is not None and not clip > 0:
        raise BadTarget(f"`--clip` must be greater than 0. Received: {clip}. Without clipping: --no-clip.")
    if clip is not None and no_clip:
        raise BadTarget("`--clip` and `--no-clip` exclude each other. Received: both. Leave out one of them, or both.")
    if no_clip:
        return [None]
    return [CLIP, None] if clip is None else [clip]


def _size(model: str | None, parameters: str | None, tensors: int | None) -> tuple[int, int]:
    """Returns how many parameters, in how many tensors, a made-up model has."""
    if model is not None and (parameters is not None or tensors is not None):
        raise BadTarget("`--model` has parameters and tensors of its own. Leave out --parameters and --tensors.")
    text = PARAMETERS if parameters is None else parameters
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text, re.IGNORECASE)
    if not parsed:
        raise BadTarget(f"`--parameters` must be a number, as in 300k, 25M or 1.5B. Received: {text!r}.")
    return round(float(parsed[1]) * UNITS[parsed[2].lower()]), tensors or TENSORS


def _show(cases: Sequence[Case], measured: Sequence[Sequence[Measured]]) -> None:
    """Prints a table for each case."""
    about = _about(cases[0])
    print(f"{about['device']}, CPU threads: {about['threads']}, torch {about['torch']}, {about['machine']}")
    print(f"parameters: {about['parameters']:,}, tensors: {about['tensors']:,}")
    for case, sides in zip(cases, measured, strict=True):
        print(f"\n{case.name}")
        print(ROW.format("side", "ms", "vs torch", "quartiles", "read", "written", "syncs"))
        for side in sides:
            low, high = side.quartiles
            ratios = (f"{side.times_torch:.2f}", f"{low:.2f}-{high:.2f}")
            passes = (f"{side.passes_read:.1f}", f"{side.passes_written:.1f}")
            print(ROW.format(side.side, f"{side.median_ms:.3g}", *ratios, *passes, side.host_reads))
    print(f"\n{LEGEND}")


def _as_json(cases: Sequence[Case], measured: Sequence[Sequence[Measured]]) -> dict[str, Any]:
    """Returns everything that was measured."""
    listed = [
        {"case": case.name, "clip": case.clip, "sides": [asdict(side) for side in sides]}
        for case, sides in zip(cases, measured, strict=True)
    ]
    return {**_about(cases[0]), "cases": listed}


def _about(case: Case) -> dict[str, Any]:
    """Returns what was measured, and on what."""
    return {
        "device": case.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "parameters": sum(map(math.prod, case.shapes)),
        "tensors": len(case.shapes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each case."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        policy = parse_policy(options.policy)
    except ValueError as error:
        parser.error(str(error))
    try:  # errors of the user's own functions are no errors in the arguments, and keep their traceback
        cases = _cases(options)
        measured = [compare(case, policy, options.repeats) for case in cases]
    except BadTarget as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps({"policy": options.policy, "repeats": options.repeats, **_as_json(cases, measured)}))
    else:
        _show(cases, measured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="MODULE:FUNCTION; the function returns a torch.nn.Module, or parameters, whose shapes are used")
    add("--parameters", help=f"size of a made-up model, as in 300k or 1.5B; by default {PARAMETERS}")
    add("--tensors", type=int, help=f"tensors of a made-up model; by default {TENSORS}")
    add("--optimizer", default="adamw", help="adamw, adam, sgd, adagrad, or MODULE:FUNCTION, which takes parameters")
    add("--implementation", help="fused, foreach or for-loop; by default fused")
    add("--clip", type=float, help=f"clip to this norm; by default both {CLIP} and --no-clip")
    add("--no-clip", action="store_true", help="do not clip")
    add("--device", help="as in cpu, cuda or cuda:1; by default the accelerator, else cpu")
    add("--threads", type=int, help="CPU threads; by default torch's choice")
    add("--repeats", type=int, default=15, help="steps of each side that are timed")
    add("--policy", "-p", default="dynamic", help="policy of LossScaler; `gradscale policies` lists the names")
    add("--json", action="store_true", help="print JSON, with the memory that each step takes")
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options describe.

    Raises:
        BadTarget: an option has no such value.
    """
    if options.repeats < 2:
        raise BadTarget(f"`--repeats` must be at least 2. Received: {options.repeats}.")
    clips = _clips(options.clip, options.no_clip)
    size = _size(options.model, options.parameters, options.tensors)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    place = device_of(options.device)
    called, make = optimizer_of(options.optimizer, options.implementation, place)
    shapes = shapes_of(options.model) if options.model is not None else made_up_shapes(*size)
    names = [f"{called}, {'no clip' if clip is None else f'clip {clip:g}'}" for clip in clips]
    return [Case(name, shapes, make, clip, place) for name, clip in zip(names, clips, strict=True)]


if __name__ == "__main__":
    main()
