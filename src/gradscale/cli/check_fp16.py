"""`gradscale check-fp16`: whether the weights of a checkpoint survive FP16."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gradscale.cli._checkpoint import tensors_of
from gradscale.cli._console import FAILURE, as_text, console, counted, table, usage_errors
from gradscale.cli._survival import Survival, survival

MOST_ROWS = 20

LEGEND = (
    "amax: largest finite weight. overflow: weights that become inf. zero, subnormal: share of the nonzero weights "
    "that become zero, or keep fewer digits."
)
WEIGHTS_ONLY = (
    "This is about weights. Activations may overflow all the same: `gradscale doctor module:factory` runs a few steps "
    "and names the operation."
)


def check_fp16(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A .safetensors file, the .index.json of several, a file of torch.save, or a folder with one.",
            metavar="CHECKPOINT",
        ),
    ],
    all_tensors: Annotated[bool, typer.Option("--all", help="Show every tensor, not only those at risk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every tensor.")] = False,
) -> None:
    """Check whether a BF16 or FP32 checkpoint survives FP16. Exits with 1 if a weight does not.

    Runs no pickled code: torch's files are loaded as weights only.
    """
    with usage_errors():
        found = [survival(name, array) for name, array in tensors_of(checkpoint)]
        if not found:
            raise ValueError(f"{checkpoint} has no floating-point tensors.")
    failed = [each for each in found if each.fails]
    if as_json:
        print(json.dumps(_as_json(found)))
    else:
        _show(found, found if all_tensors else [each for each in found if each.risk])
    if failed:
        raise typer.Exit(FAILURE)


def _as_json(found: Sequence[Survival]) -> dict[str, Any]:
    return {
        "survives": not any(each.fails for each in found),
        "tensors": [
            {
                **asdict(each),
                "flushed_share": each.flushed_share,
                "subnormal_share": each.subnormal_share,
                "risk": each.risk,
            }
            for each in found
        ],
    }


def _show(found: Sequence[Survival], shown: Sequence[Survival]) -> None:
    screen = console()
    elements = sum(each.elements for each in found)
    screen.print(f"{counted(len(found), 'tensor')}, {counted(elements, 'weight')}")
    if shown:
        rows = table("tensor", "amax", "overflow", "zero", "subnormal", "risk", prose=1)
        # The worst first: what fails, then the largest shares.
        for each in sorted(shown, key=lambda one: (not one.fails, -one.flushed_share, -one.amax))[:MOST_ROWS]:
            rows.add_row(
                as_text(each.name),
                f"{each.amax:.3g}",
                str(each.overflowed),
                f"{each.flushed_share:.2%}",
                f"{each.subnormal_share:.2%}",
                each.risk,
            )
        screen.print(rows)
        if len(shown) > MOST_ROWS:
            screen.print(f"and {len(shown) - MOST_ROWS} more; --json has all of them")
        screen.print(LEGEND)
    screen.print(_verdict(found))
    screen.print(WEIGHTS_ONLY)


def _verdict(found: Sequence[Survival]) -> str:
    failed = sum(each.fails for each in found)
    risky = sum(bool(each.risk) for each in found) - failed
    if failed:
        return (
            f"[bold]It does not survive[/bold]: {counted(failed, 'tensor')} with inf or NaN in FP16. Keep them in "
            "float32 or BF16."
        )
    if risky:
        named = counted(risky, "tensor")
        return f"[bold]It survives, with {named} at risk.[/bold] Keep these in float32 if quality drops."
    return "[bold]It survives[/bold]: every weight has an FP16 number close to it."
