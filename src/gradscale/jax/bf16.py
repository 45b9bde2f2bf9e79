"""Whether a forward pass ran in BF16, where no loss scaling is needed."""

from typing import Any

import jax
import jax.numpy as jnp

from gradscale.engine.bf16 import may_be_noted, note_bf16
from gradscale.policies.contract import Policy


def note_if_bf16(pullback: Any, policy: Policy) -> None:
    """Logs that scaling is not needed if what a forward pass kept for its backward pass is BF16 and nowhere narrower.

    Reads types alone, which are known while a function is traced.
    """
    if not may_be_noted(policy):
        return
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)}
    floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    narrow = {dtype for dtype in floats if dtype.itemsize < 4}
    if narrow == {jnp.dtype("bfloat16")}:
        note_bf16(
            "`value_and_grad` scales a loss that was computed in BF16.",
            "Switch scaling off: `Scaler(NoScaling())`.",
        )
