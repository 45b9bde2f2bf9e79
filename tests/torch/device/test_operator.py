"""A step of a rule as an operator: on the CPU, and so on the simulated device, it is the rule of the host."""

import numpy as np
import pytest
import torch
from tests.torch.device.rules import POLICIES, differ, expected, numbers, states, variants

from gradscale import Headroom, Policy
from gradscale.engine.packed import Packed, norm_of
from gradscale.kernels.triton.operator import advance, number_of

COUNT, FIRST, END, COLUMNS = 128, 150, 300, 304


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_operator_is_bit_exact_with_numpy(policy: Policy) -> None:
    generator = np.random.default_rng(0)
    device = torch.get_default_device()
    for packed in variants(policy):
        before, found = states(packed, COUNT, generator), numbers(COUNT, COLUMNS, generator)
        rows = zip(*(torch.from_numpy(each.copy()).to(device) for each in (before, found)), strict=True)
        after = [advance(state, row, FIRST, END, 0.3, number_of(packed)) for state, row in rows]
        wanted = expected(packed, before, found, FIRST, END, 0.3)
        assert not differ(packed, torch.stack(after).cpu().numpy(), wanted).any()


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000])
def test_the_norm_of_sizes_is_that_of_float64(count: int) -> None:
    sizes = np.random.default_rng(0).random((3, count), np.float32)
    assert np.allclose(norm_of(sizes), np.linalg.norm(sizes.astype(np.float64), axis=1), rtol=1e-6, atol=0)


def test_the_operator_is_on_the_device_and_does_not_change_its_arguments() -> None:
    packed, device = Packed(Headroom()), torch.get_default_device()
    state = torch.from_numpy(packed.pack(packed.policy.start())).to(device)
    before = state.clone()
    after = advance(state, torch.tensor([2.0, 1.0], device=device), 0, 1, 0.0, number_of(packed))
    assert after.device.type == device.type
    assert torch.equal(state, before)
    assert not torch.equal(after, before)


@pytest.mark.cpu_only("it compares with the CPU itself")
def test_the_operator_fits_torchs_contract() -> None:
    packed = Packed(Headroom(), norm=True, amax=False, clips=True)
    state = torch.from_numpy(packed.pack(packed.policy.start()))
    arguments = (state, torch.tensor([3.0, 1.0]), 1, 1, 1.0, number_of(packed))
    torch.library.opcheck(advance, arguments)


def test_a_packed_state_is_read_as_it_was_written() -> None:
    packed = Packed(Headroom())
    before = states(packed, COUNT, np.random.default_rng(0))
    state, outcome = packed.unpack(before)
    assert np.array_equal(packed.pack(state, outcome), before)
