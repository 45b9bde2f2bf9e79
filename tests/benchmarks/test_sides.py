"""The ways to make one step: they make the same step, on parameters of their own, from new gradients."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.sides import BARE, SCALE, TORCH, Case, all_sides, bare, loss_scaler
from torch import Tensor

from gradscale import NoScaling, Policy, Static
from gradscale.policies.headroom import Headroom

SHAPES = [(3, 4), (5,)]
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


def case(optimizer: str = "adamw fused", clip: float | None = 0.001) -> Case:
    return Case("a case", SHAPES, OPTIMIZERS[optimizer], clip)


@pytest.mark.parametrize("clip", [0.001, None])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_side_makes_the_same_step(optimizer: str, clip: float | None) -> None:
    sides = all_sides(case(optimizer, clip))
    for side in sides.values():
        before = [parameter.detach().clone() for parameter in side.parameters]
        for _ in range(3):
            side.turn()
        assert not any(map(torch.equal, side.parameters, before))
    for side in sides.values():
        for found, expected in zip(side.parameters, sides[BARE].parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_parameters_are_float32_whatever_torchs_defaults_are() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            sides = all_sides(case())
    finally:
        torch.set_default_dtype(before)
    held = [parameter for side in sides.values() for parameter in side.parameters]
    assert {(parameter.dtype, parameter.device.type) for parameter in held} == {(torch.float32, "cpu")}


def test_torchs_scaler_is_the_first_side_and_no_scaling_the_last() -> None:
    names = list(all_sides(case()))
    assert (names[0], names[-1], len(names)) == (TORCH, BARE, 4)


def test_no_two_sides_share_memory() -> None:
    sides = all_sides(case())
    for side in sides.values():
        side.prepare()
    held = [tensor for side in sides.values() for param in side.parameters for tensor in (param, param.grad)]
    assert len({tensor.data_ptr() for tensor in held if tensor is not None}) == 4 * 2 * len(SHAPES)


def test_gradients_are_scaled_as_the_side_needs_them_and_the_same_before_every_run() -> None:
    for name, side in all_sides(case()).items():
        seen = []
        for _ in range(2):
            side.prepare()
            gradient = side.parameters[0].grad
            assert gradient is not None
            seen.append(gradient.clone() / (1.0 if name == BARE else SCALE))
            side.run()
        assert torch.equal(*seen)
        assert 1e-4 < seen[0].norm().item() < 1e-1


@pytest.mark.parametrize("policy", [Static(8.0), NoScaling(), Headroom()], ids=lambda policy: type(policy).__name__)
def test_a_policy_gets_gradients_at_the_scale_it_has(policy: Policy) -> None:
    scaled, unscaled = loss_scaler(case(), policy), bare(case())
    for _ in range(3):
        scaled.turn()
        unscaled.turn()
    for found, expected in zip(scaled.parameters, unscaled.parameters, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_side_synchronizes_with_the_accelerator_its_parameters_are_on_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronized: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    bare(case()).synchronize()
    assert synchronized == []
    bare(Case("elsewhere", SHAPES, torch.optim.SGD, None, "meta")).synchronize()
    assert synchronized == ["meta"]
