"""Policies by name, on the command line and in every adapter: `dynamic:growth_interval=100`, `static:1024`, `apex`."""

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gradscale._text import did_you_mean, short
from gradscale.peers import PEERS, SYSTEM_ALIASES, preset
from gradscale.policies.contract import Policy, check_policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.policies.static import CheckOnly, NoScaling, Static

POLICIES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "dynamic": Dynamic,
        "headroom": Headroom,
        "logmax": LogMax,
        "histogram": Histogram,
        "static": Static,
        "check_only": CheckOnly,
        "none": NoScaling,
    }
)
"""gradscale's own policies, by their names."""

AUTO = "auto"
"""Another name of `headroom`, which follows the gradients of an FP16 run: the default of the adapters."""

WORDS = {"true": True, "false": False, "none": None, "inf": float("inf")}
POWER = re.compile(r"([1-9]\d*)(?:\*\*|\^)(-?\d+)")


def as_policy(policy: Policy | str) -> Policy:
    """Returns `policy`, or the one that it names.

    >>> as_policy("auto") == as_policy("headroom") == Headroom()
    True

    Raises:
        TypeError: it is neither a policy nor a name.
        ValueError: there is no policy of that name, or a setting is unknown or out of range.
    """
    if isinstance(policy, str):
        try:
            return _parsed(policy)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "`policy` must be a policy, such as `Dynamic()`, or name one. "
                f"Received: policy={short(policy)}: {error}"
            ) from None
    check_policy(policy)
    return policy


def parse_policy(spec: str) -> Policy:
    """Returns the policy that `spec`, a value of `--policy`, names.

    The form is NAME, NAME:VALUE or NAME:SETTING=VALUE,SETTING=VALUE. The name is one of gradscale's own policies, or
    another system, as in `torch` or `apex/amp.LossScaler`, with that system's own settings.

    >>> parse_policy("static:2**10")
    Static(scale=1024.0)
    >>> parse_policy("dynamic:growth_interval=100").growth_interval
    100

    Raises:
        ValueError: a name or setting is unknown, or a value is out of range or has the wrong type.
    """
    try:
        return _parsed(spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`--policy` {short(spec)}: {error}") from None


def _parsed(spec: str) -> Policy:
    name, _, settings = spec.partition(":")
    system, slash, rule = (part.strip() for part in name.partition("/"))
    system = system.lower()
    own = POLICIES.get("headroom" if system == AUTO else system)
    if own is not None:
        return _own(system, own, slash + rule, settings)
    plain = system.replace("_", "-")
    if plain not in (*PEERS, *SYSTEM_ALIASES):
        raise ValueError(_unknown(system))
    if slash and not rule:
        known = PEERS[SYSTEM_ALIASES.get(plain, plain)].variants
        raise ValueError(
            f"a rule must be named after the slash, as in {system}/{next(iter(known))}. Without it: {system}."
        )
    return preset(system, rule or None, **_pairs(settings))


def _unknown(name: str) -> str:
    own = (AUTO, *POLICIES)
    return (
        f"there is no policy of that name.{did_you_mean(name, (*own, *PEERS, *SYSTEM_ALIASES))} "
        f"Known: {', '.join(own)}; and the rules of other systems: {', '.join(PEERS)}."
    )


def _own(name: str, kind: type[Any], rule: str, settings: str) -> Policy:
    """Returns the policy of one of gradscale's own classes. A lone value is its first setting."""
    if rule:
        raise ValueError(f"only other systems have rules to choose from. Received: {rule[1:]!r}.")
    accepted = inspect.signature(kind).parameters
    is_lone_value = bool(settings and accepted) and "=" not in settings
    pairs = _pairs(f"{next(iter(accepted))}={settings}" if is_lone_value else settings)
    if unknown := sorted(pairs.keys() - accepted.keys()):
        raise ValueError(
            f"there is no setting {', '.join(unknown)}.{did_you_mean(unknown[0], accepted)} "
            f"Known: {', '.join(accepted) or 'none'}."
        )
    if missing := [setting for setting in accepted.values() if setting.default is setting.empty and not pairs]:
        raise ValueError(f"{missing[0].name} must be given, as in {name}:1024.")
    return kind(**pairs)


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
