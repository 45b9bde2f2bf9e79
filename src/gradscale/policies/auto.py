"""What `policy="auto"` means, on every adapter."""

from typing import Literal

from gradscale.policies.contract import Policy, check_policy
from gradscale.policies.headroom import Headroom


def as_policy(policy: Policy | Literal["auto"]) -> Policy:
    """Returns `policy`, or `Headroom()` for `"auto"`: the scale then follows the gradients of an FP16 run.

    Raises:
        TypeError: it is neither `"auto"` nor a policy.
    """
    if isinstance(policy, str):
        if policy == "auto":
            return Headroom()
        raise TypeError(f"`policy` must be 'auto' or a policy, such as `Dynamic()`. Received: policy={policy!r}.")
    check_policy(policy)
    return policy
