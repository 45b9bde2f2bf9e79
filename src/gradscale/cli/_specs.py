"""Policies as the command line names them: `dynamic:growth_interval=100`, `static:1024`, `deepspeed`."""

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gradscale.formats import get_format
from gradscale.peers import PEERS, preset
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.policies.static import NoScaling, Static

POLICIES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "dynamic": Dynamic,
        "headroom": Headroom,
        "logmax": LogMax,
        "histogram": Histogram,
        "static": Static,
        "none": NoScaling,
    }
)
"""gradscale's own policies, by their names on the command line."""

WORDS = {"true": True, "false": False, "none": None, "inf": float("inf")}
POWER = re.compile(r"([1-9]\d*)(?:\*\*|\^)(-?\d+)")


def parse_policy(spec: str) -> Policy:
    """Returns the policy that `spec` names.

    The form is NAME, NAME:VALUE or NAME:SETTING=VALUE,SETTING=VALUE. The name is one of gradscale's own policies, or
    another system, as in `torch` or `apex/amp.LossScaler`, with that system's own settings.

    >>> parse_policy("static:2**10")
    Static(scale=1024.0)
    >>> parse_policy("dynamic:growth_interval=100").growth_interval
    100

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a name or setting is unknown, or a value is out of range.
    """
    name, _, settings = spec.partition(":")
    system, _, rule = name.strip().partition("/")
    try:
        if system.lower() in POLICIES:
            return _own(system.lower(), rule, settings)
        return preset(system, rule or None, **_pairs(settings))
    except (ValueError, TypeError) as error:
        known = system.lower() in (*POLICIES, *PEERS)
        others = "" if known else f" Or one of gradscale's own: {', '.join(POLICIES)}."
        raise ValueError(f"policy {spec!r}: {error}{others}") from None


def _own(name: str, rule: str, settings: str) -> Policy:
    """Returns one of gradscale's own policies. A lone value is its first setting."""
    if rule:
        raise ValueError(f"only other systems have rules to choose from. Received: {rule!r}.")
    accepted = inspect.signature(POLICIES[name]).parameters
    is_lone_value = bool(settings and accepted) and "=" not in settings
    pairs = _pairs(f"{next(iter(accepted))}={settings}" if is_lone_value else settings)
    if unknown := sorted(pairs.keys() - accepted.keys()):
        raise ValueError(f"there is no setting {', '.join(unknown)}. Known: {', '.join(accepted) or 'none'}.")
    if missing := [setting for setting in accepted.values() if setting.default is setting.empty and not pairs]:
        raise ValueError(f"{missing[0].name} must be given, as in {name}:1024.")
    if "format" in pairs:
        pairs["format"] = get_format(pairs["format"])
    return POLICIES[name](**pairs)


def _pairs(text: str) -> dict[str, Any]:
    """Returns the settings in `SETTING=VALUE,SETTING=VALUE`."""
    pairs: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"settings are given as SETTING=VALUE, separated by commas. Received: {part!r}.")
        if name in pairs:
            raise ValueError(f"{name} is given twice.")
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> Any:
    """Returns a word, a whole number, a number or a power, as in 2**16 or 2^16, by the form of `text`."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if power := POWER.fullmatch(text):
        exponent = int(power[2])
        if not -1022 <= exponent <= 126:
            raise ValueError(f"an exponent must lie between -1022 and 126. Received: {text}.")
        return int(power[1]) ** exponent
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
