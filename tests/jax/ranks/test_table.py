"""Four devices, in every way to train on them: one decision, the norm of one device, and its weights, bit for bit.

Bits are compared where arithmetic is exact (see `model`); where gradients are clipped by their norm, 1e-6.
"""

from functools import cache
from itertools import pairwise

import jax
import numpy as np
import pytest
from tests.jax.ranks.layouts import Options
from tests.jax.ranks.model import batches
from tests.jax.ranks.training import CASES, Ended, on_one_device

PLAIN = Options()
CLIPPED = Options(clip_norm=0.5, clip_value=0.125)

CLIPPED_CASES = [
    "shard_map, both",
    "shard_map, fsdp and tensor",
    "shard_map, fsdp, check_vma=False",
    "shard_map, tensor, check_vma=False",
    "jit, fsdp",
    "pmap",
]
"""Cases that clip in the short test; the others do not. The slow test has both of each. The norm is always compared."""

SHORT, LONG = 14, 500


@cache
def expected(options: Options, steps: int) -> Ended:
    return on_one_device(options, batches(steps))


def check(case: str, options: Options, steps: int) -> None:
    """Trains on four devices and on one, and compares everything that both know."""
    state, results = CASES[case](options, batches(steps))
    one, alone = expected(options, steps)
    for step, (ours, theirs) in enumerate(zip(results, alone, strict=True)):
        assert ours[:3] == theirs[:3], f"step {step}: applied, loss_finite and scale"
        np.testing.assert_allclose(ours[3], theirs[3], rtol=1e-6, err_msg=f"norm of step {step}")
    assert jax.tree.structure(state) == jax.tree.structure(one)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True):
        if options.clip_norm is None:
            assert ours.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_run_has_steps_of_every_kind() -> None:
    (_, _, scaler), results = expected(PLAIN, SHORT)
    overflows = [not applied and bool(finite) for applied, finite, *_ in results]
    bad_losses = [not applied and not finite for applied, finite, *_ in results]
    assert (sum(overflows) >= 2, sum(bad_losses) >= 2, int(scaler.state.applied) >= 6) == (True, True, True)
    scales = [float(scale) for _, _, scale, _ in results]
    assert any(after > before for before, after in pairwise(scales))
    assert any(0.5 < float(norm) < np.inf for *_, norm in results), "no step is clipped"


@pytest.mark.parametrize("case", CASES)
def test_four_devices_train_as_one(case: str) -> None:
    check(case, CLIPPED if case in CLIPPED_CASES else PLAIN, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, CLIPPED], ids=["plain", "clipped"])
@pytest.mark.parametrize("case", CASES)
def test_four_devices_train_as_one_for_long(case: str, options: Options) -> None:
    check(case, options, LONG)
