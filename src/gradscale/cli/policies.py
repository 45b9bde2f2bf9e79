"""`gradscale policies`: every policy, its settings and its rule."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gradscale.cli._console import console, number, table
from gradscale.formats import Format
from gradscale.peers import PEERS
from gradscale.peers._peer import Peer
from gradscale.peers.specs import POLICIES
from gradscale.policies.contract import Policy

ABOUT_PRESETS = (
    "[bold]Presets[/bold]: each does what another system does, with that system's own settings. It is named by the "
    "system alone, for the first rule listed, or as system/rule; the last word of a rule's name is enough.\n"
)


def policies() -> None:
    """List the policies: gradscale's own, and the presets that follow other systems bit-exactly."""
    screen = console()
    for name, policy_class in POLICIES.items():
        screen.print(f"[bold]{name}[/bold]: {escape(_first_line(policy_class))}", _settings(policy_class))
    screen.print(ABOUT_PRESETS)
    for system, peer in PEERS.items():
        screen.print(f"[bold]{system}[/bold]")
        for builder, names in _rules(peer).items():
            screen.print(Padding(escape(" or ".join(names)), (0, 0, 0, 2)))
            screen.print(Padding(escape(_signature(builder)), (0, 0, 0, 6)))


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
