"""`gradscale replay`: what policies would have done over recorded steps."""

import json
import re
from dataclasses import asdict
from typing import Annotated, Any, TypeGuard

import numpy as np
import typer
from rich.markup import escape

from gradscale.cli._console import console, counted, number, table, usage_errors
from gradscale.cli._sequences import SIZES, STDIN, read_sequences
from gradscale.cli.report import show_predictions
from gradscale.formats import Format, get_format
from gradscale.peers.specs import parse_policy
from gradscale.record import plain
from gradscale.recording.logs import read_any
from gradscale.recording.writer import START
from gradscale.replay.run import Replay
from gradscale.replay.run import replay as run_replay

LEGEND = (
    "skipped: steps. final, lowest, highest: scales. floor, ceiling: steps that ended with the scale at the policy's "
    "bound. stuck: the first step, counted from 0, that overflowed with no lower scale to go to."
)


def replay(
    file: Annotated[
        list[str] | None,
        typer.Argument(
            help="The record of a run; or a file with 0 (clean) or 1 (overflow) for each step, or a JSON list of them, "
            "or a JSON object with found_inf, amax, loss_finite or upper_share. '-' is standard input, which is also "
            "the default. Further arguments are policies.",
            show_default=False,
            metavar="FILE [POLICY]...",
        ),
    ] = None,
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy",
            "-p",
            help="NAME, NAME:VALUE or NAME:SETTING=VALUE,...; give it again for more policies. "
            "`gradscale policies` lists the names.",
        ),
    ] = ["dynamic"],  # noqa: B006 - typer reads the list and does not change it
    amax: Annotated[
        str | None,
        typer.Option(
            help="File with the largest unscaled gradient of each step. Without flags, it decides by each policy's own "
            "scale what overflows.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Format in which gradients overflow, where --amax decides.")] = "FP16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the scale after each step.")] = False,
) -> None:
    """Show what policies would have done over a recorded run.

    Examples: gradscale replay run.jsonl --policy auto dynamic:growth_interval=200 deepspeed;
    echo 0 0 1 0 | gradscale replay -p dynamic:growth_interval=2 -p torch -p static:1024
    """
    flags, policy = file[0] if file else None, [*policy, *(file or [])[1:]]
    with usage_errors():
        policies = [parse_policy(spec) for spec in policy]
        if amax is None and is_record(flags):
            show_predictions(read_any(flags), dict(zip(policy, policies, strict=True)), as_json)
            return
        overflows_in = _format(format)
        sequences = read_sequences(flags, amax)
        try:
            run = run_replay(policies, **sequences, format=overflows_in)
        except (ValueError, TypeError) as error:
            raise ValueError(_as_options(str(error), amax_given=amax is not None)) from None
    if as_json:
        print(json.dumps(_as_json(run, policy), allow_nan=False))
    else:
        _show(run, policy)


def is_record(path: str | None) -> TypeGuard[str]:
    """Returns whether a file is the record of a run, by its first bytes."""
    if path in (None, "", STDIN):
        return False
    with open(path, "rb") as file:
        return file.read(len(START)) == START


def _format(name: str) -> Format:
    try:
        return get_format(name)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`--format`: {error}") from None


def _as_options(message: str, *, amax_given: bool) -> str:
    """Returns an error of `gradscale.replay` with its arguments named as on the command line."""
    option = " by --amax FILE, or" if "Pass `amax` to" in message else ""
    named = re.sub(r"Pass (.*) to `replay` as well\.", rf"Give it{option} as \1 in a JSON object.", message)
    if "`found_inf` must hold flags" in named:
        named = f"{named} {SIZES}"
    return named.replace("`amax`", "`--amax`") if amax_given else named


def _show(run: Replay, specs: list[str]) -> None:
    """Prints a row for each policy."""
    rows = table("policy", "skipped", "final", "lowest", "highest", "floor", "ceiling", "stuck")
    for spec, summary in zip(specs, run.summaries(), strict=True):
        scales = (summary.final_scale, summary.lowest_scale, summary.highest_scale)
        counts = (summary.steps_at_floor, summary.steps_at_ceiling)
        stuck = "" if summary.first_stuck_step is None else str(summary.first_stuck_step)
        words = re.sub(r"([:,])\s*", r"\1 ", spec)  # so that a long one breaks between its settings
        rows.add_row(escape(words), str(summary.skipped), *map(number, scales), *map(str, counts), stuck)
    screen = console()
    screen.print(counted(len(run.scales), "step"), rows)
    screen.print(LEGEND)


def _as_json(run: Replay, specs: list[str]) -> dict[str, Any]:
    """Returns the whole run as JSON can hold it; infinity and NaN are the strings "inf" and "nan"."""
    summaries = run.summaries()
    return {
        "steps": len(run.scales),
        "policies": [
            {
                "policy": spec,
                "settings": run.policies[column].to_dict(),
                "summary": plain(asdict(summaries[column])),
                "scales": plain(run.scales[:, column]),
                "skipped": plain(run.skipped[:, column].astype(np.uint8)),
                "stuck": plain(run.stuck[:, column].astype(np.uint8)),
            }
            for column, spec in enumerate(specs)
        ],
    }
