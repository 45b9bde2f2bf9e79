"""How many operators each rule is, on the arrays of a framework: a rule that nobody can follow is too long."""

from typing import Any

import numpy as np
import pytest

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, Seen, Static
from gradscale.record import place

MOST = {"CheckOnly": 19, "Static": 19, "Dynamic": 54, "Histogram": 99, "Headroom": 120, "LogMax": 281}
"""Only lower these: `Headroom`, the default, may have 120."""


@pytest.mark.parametrize("policy", [CheckOnly(), Static(2.0), Dynamic(), Histogram(), Headroom(), LogMax()], ids=repr)
def test_a_step_of_a_rule_has_no_more_operators_than_before(policy: Any) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        """Counts the operators that run inside."""

        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    state, seen = place(policy.start(), torch.as_tensor), place(Seen(amax=np.float32(0.1)), torch.as_tensor)
    with Operators() as operators:
        policy.next(state, seen, torch)
    assert 0 < operators.count <= MOST[type(policy).__name__]
