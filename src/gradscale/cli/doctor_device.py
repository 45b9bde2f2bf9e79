"""`gradscale doctor --device`: a self-test of a device, to paste into a bug report."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from gradscale import __version__
from gradscale._extras import require
from gradscale.cli._console import FAILURE, console, table, usage_errors

if TYPE_CHECKING:
    from gradscale.checkup.device import DeviceFinding

MARKS = {True: "ok", False: "FAILED", None: "-"}


def examine_device(device: str, *, as_json: bool) -> None:
    """Tests a device and prints a row for each test. Exits with 1 if one fails."""
    with usage_errors():
        require("`gradscale doctor --device`", "torch", extra="torch")
        from gradscale.bench.targets import device_of

        chosen = device_of(device)
    import torch

    from gradscale.checkup.device import check_device

    screen = console()
    with screen.status(f"testing {chosen}"):
        found = check_device(chosen)
    if as_json:
        about = {"gradscale": __version__, "torch": torch.__version__, "device": chosen, "name": _name(chosen)}
        print(json.dumps({**about, "tests": [asdict(each) for each in found]}))
    else:
        screen.print(escape(f"gradscale {__version__}, torch {torch.__version__}, {platform.platform()}"))
        _show(_name(chosen), found)
    if any(each.passed is False for each in found):
        raise typer.Exit(FAILURE)


def _name(device: str) -> str:
    import torch

    kind = torch.device(device).type
    names = getattr(getattr(torch, kind, None), "get_device_name", None)
    return f"{names(device)} ({device})" if names is not None else device


def _show(name: str, found: Sequence["DeviceFinding"]) -> None:
    rows = table(name, "result", "detail", prose=2)
    for each in found:
        rows.add_row(escape(each.name), MARKS[each.passed], escape(each.detail))
    console().print(rows)
