"""`gradscale policies`: every policy, its settings and its rule."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gradscale._text import did_you_mean
from gradscale.cli._console import console, fail, number, table
from gradscale.formats import Format
from gradscale.peers import PEERS
from gradscale.peers._peer import Peer
from gradscale.peers.specs import POLICIES
from gradscale.policies.contract import Policy
from gradscale.record import plain

ABOUT_PRESETS = (
    "[bold]Presets[/bold]: each does what another system does, with that system's own settings. It is named by the "
    "system alone, for the first rule listed, or as system/rule; the last word of a rule's name is enough."
)


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the settings of this policy, or the rules of this system.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all settings.")] = False,
) -> None:
    """List the policies: gradscale's own, and the presets that follow other systems bit-exactly."""
    screen = console()
    if as_json:
        print(json.dumps(_as_json(), allow_nan=False))
    elif name is None:
        rows = table("policy", "rule", prose=1)
        for known, policy_class in POLICIES.items():
            rows.add_row(known, escape(_first_line(policy_class)))
        screen.print(rows, ABOUT_PRESETS)
        rows = table("system", "rules", prose=1)
        for system, peer in PEERS.items():
            rows.add_row(system, escape(", ".join(names[0] for names in _rules(peer).values())))
        screen.print(rows, "Settings: gradscale policies NAME")
    elif name in POLICIES:
        screen.print(f"[bold]{name}[/bold]: {escape(_first_line(POLICIES[name]))}", _settings(POLICIES[name]))
    elif name in PEERS:
        screen.print(f"[bold]{name}[/bold]")
        for builder, names in _rules(PEERS[name]).items():
            screen.print(Padding(escape(" or ".join(names)), (0, 0, 0, 2)))
            screen.print(Padding(escape(_signature(builder)), (0, 0, 0, 6)))
    else:
        fail(f"There is no policy or system {name!r}.{did_you_mean(name, [*POLICIES, *PEERS])}")


def _as_json() -> dict[str, Any]:
    """Returns the policies by name and the presets by system, with their settings."""
    return {
        "policies": {name: _own_as_json(policy_class) for name, policy_class in POLICIES.items()},
        "presets": {
            system: [
                {"rules": names, "settings": _settings_as_json(inspect.signature(builder).parameters.values())}
                for builder, names in _rules(peer).items()
            ]
            for system, peer in PEERS.items()
        },
    }


def _own_as_json(policy_class: type) -> dict[str, Any]:
    settings = _settings_as_json(inspect.signature(policy_class).parameters.values())
    meanings = _meanings(policy_class)
    described = [{**setting, "meaning": meanings.get(setting["name"], "")} for setting in settings]
    return {"rule": _first_line(policy_class), "settings": described}


def _settings_as_json(settings: Iterable[inspect.Parameter]) -> list[dict[str, Any]]:
    """Returns the settings with their defaults; one that must be given has no default."""
    return [
        {"name": one.name} if one.default is one.empty else {"name": one.name, "default": plain(one.default)}
        for one in settings
    ]


def _settings(policy_class: type) -> Table | str:
    """Returns the settings of one of gradscale's own policies, with what its docstring says of each."""
    fields = dataclasses.fields(policy_class)
    if not fields:
        return ""
    meanings = _meanings(policy_class)
    rows = table("setting", "default", "meaning", prose=1)
    for field in fields:
        rows.add_row(field.name, _default(field.default), escape(meanings.get(field.name, "")))
    return rows


def _rules(peer: Peer) -> dict[Callable[..., Policy], list[str]]:
    """Returns the rules of a system, each with all its names."""
    rules: dict[Callable[..., Policy], list[str]] = {}
    for name, builder in peer.variants.items():
        rules.setdefault(builder, []).append(name)
    return rules


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _meanings(policy_class: type) -> dict[str, str]:
    """Returns what the docstring says of each setting: its `Attributes` section, by name."""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)*)", inspect.getdoc(policy_class) or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _signature(builder: Callable[..., Policy]) -> str:
    settings = inspect.signature(builder).parameters.values()
    named = (s.name if s.default is s.empty else f"{s.name}={_default(s.default)}" for s in settings)
    return ", ".join(named) or "no settings"


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Format):
        return value.name
    return number(value) if isinstance(value, float) else str(value)
