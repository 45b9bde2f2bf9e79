"""Which rule an optimizer follows: Keras' own, by Keras' arguments, or the policy it is given."""

from collections.abc import Mapping
from typing import Any, Literal

from gradscale.engine.saved import policy_from_dict
from gradscale.policies.auto import as_policy
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_count, check_scale
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic

INITIAL_SCALE = 2.0**15
DYNAMIC_GROWTH_STEPS = 2000
"""Keras' own defaults."""


def chosen_policy(initial_scale: float, dynamic_growth_steps: int, policy: Policy | Literal["auto"] | None) -> Policy:
    """Returns the rule: `policy`, or where there is none Keras' own, which doubles and halves.

    Keras' rule goes on to infinity and to zero, and stays there. Here it ends at 2**126 and at 2**-126.

    Raises:
        TypeError: `policy` is no policy, or one of Keras' arguments is no number.
        ValueError: both were given, or one of Keras' arguments is out of range.
    """
    if policy is None:
        check_scale("initial_scale", initial_scale)
        check_count("dynamic_growth_steps", dynamic_growth_steps)
        return Dynamic(
            init_scale=initial_scale,
            growth_interval=dynamic_growth_steps,
            min_scale=LOWEST_SCALE,
            max_scale=HIGHEST_SCALE,
        )
    if (initial_scale, dynamic_growth_steps) != (INITIAL_SCALE, DYNAMIC_GROWTH_STEPS):
        raise ValueError(
            "`policy` replaces `initial_scale` and `dynamic_growth_steps`. Received all at once: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps={dynamic_growth_steps!r}, policy={policy!r}. "
            "Give them to the policy: `Dynamic(init_scale=..., growth_interval=...)`."
        )
    return as_policy(policy)


def with_policy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that `get_config` wrote, with the policy made of its dict where there is one."""
    arguments = dict(config)
    if isinstance(arguments.get("policy"), Mapping):
        arguments["policy"] = policy_from_dict(arguments["policy"])
    return arguments
