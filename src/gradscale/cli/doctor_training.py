"""`gradscale doctor MODULE:FUNCTION`: a few steps of a training, and what is wrong with them."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from gradscale._extras import require
from gradscale.cli._console import FAILURE, console, counted, fail, number, usage_errors
from gradscale.engine import health_log
from gradscale.peers.specs import parse_policy
from gradscale.record import plain

if TYPE_CHECKING:
    from gradscale.checkup.training import Checkup


def examine_training(path: str, steps: int, policy: str, *, as_json: bool) -> None:
    """Runs steps of what the function returns and prints a diagnosis. Exits with 1 if something must be done."""
    with usage_errors():
        require("`gradscale doctor MODULE:FUNCTION`", "torch", extra="torch")
        rule = parse_policy(policy)
    from gradscale.bench.targets import BadTarget
    from gradscale.checkup.training import check_training, load_training

    # What it would log about the health of the run is printed below.
    health_log.logger.disabled = True
    try:
        found = check_training(load_training(path), steps, rule)
    except BadTarget as error:  # no other: an error in the user's functions keeps its traceback
        fail(str(error))
    finally:
        health_log.logger.disabled = False
    if as_json:
        print(json.dumps(_as_json(found)))
    else:
        _show(found)
    if not found.healthy:
        raise typer.Exit(FAILURE)


def _show(found: "Checkup") -> None:
    screen = console()
    screen.print(
        f"{counted(len(found.losses), 'step')}, {len(found.skipped)} skipped; "
        f"loss {found.losses[0]:.4g} to {found.losses[-1]:.4g}; scale {number(found.scales[-1])}"
    )
    for step, why in list(found.skipped.items())[-3:]:
        screen.print(f"  step {step}: {escape(why)}")
    screen.print(f"[bold]Health[/bold]: {escape(str(found.health))}")
    if found.report is not None:
        screen.print(f"[bold]Probe of a skipped step[/bold]: {escape(str(found.report))}", soft_wrap=True)


def _as_json(found: "Checkup") -> dict[str, Any]:
    """Returns the diagnosis as JSON can hold it; infinity and NaN are the strings "inf" and "nan"."""
    report = found.report
    operation = None if report is None else report.operation
    return {
        "healthy": found.healthy,
        "losses": plain(found.losses),
        "scales": plain(found.scales),
        "skipped": {str(step): why for step, why in found.skipped.items()},
        "health": {
            "condition": found.health.condition.value,
            "advice": found.health.advice,
            "applied": found.health.applied,
            "steps": found.health.steps,
            "evidence": {name: plain(value) for name, value in found.health.evidence.items()},
        },
        "probe": None
        if report is None
        else {
            "verdict": report.verdict.value,
            "advice": report.advice,
            "halvings": report.halvings,
            "tensor": report.tensor,
            "operation": None
            if operation is None
            else {
                "name": operation.name,
                "phase": operation.phase,
                "module": operation.module,
                "source": None if operation.source is None else asdict(operation.source),
            },
        },
    }
