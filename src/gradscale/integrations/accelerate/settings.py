"""The rule of an installed scaler: a policy, or the numbers that an accelerator was built with."""

from typing import Any

from accelerate.utils import GradScalerKwargs

from gradscale.peers import preset
from gradscale.peers.specs import AUTO, as_policy
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def settings_of(policy: Policy | str | None, given: GradScalerKwargs | None) -> dict[str, Any]:
    """Returns the arguments of `GradScaler` that are its rule.

    Args:
        policy: what `install` was called with; None if nothing.
        given: what the accelerator was built with; None if nothing.

    Raises:
        ValueError: both are given, and are two rules.
    """
    if given is None:
        return {"policy": AUTO if policy is None else policy}
    numbers = {name: getattr(given, name) for name in (*NUMBERS, "enabled")}
    if policy is None:
        return numbers
    chosen = as_policy(policy)
    if not _agree(chosen, numbers):
        raise ValueError(
            "`policy` and the `GradScalerKwargs` of the accelerator are two rules for one scale. "
            f"Received: policy={chosen!r} and {given!r}. Give one of them."
        )
    return {"policy": chosen}


def _agree(policy: Policy, numbers: dict[str, Any]) -> bool:
    """Returns whether `policy` says the same as the numbers; it may say more, such as bounds."""
    if not numbers["enabled"]:
        return not policy.needs
    rule = {name: numbers[name] for name in NUMBERS}
    if isinstance(policy, Dynamic):
        return all(getattr(policy, name) == value for name, value in rule.items())
    return policy == preset("torch", **rule)
