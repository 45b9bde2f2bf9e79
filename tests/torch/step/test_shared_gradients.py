"""A gradient that several parameters, groups or optimizers hold is divided once."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.torch.versions import needs_grad_dtype
from torch import Tensor, nn

from gradscale import NoScaling, Policy, Static
from gradscale.torch import LossScaler, MasterWeights

pytestmark = pytest.mark.usefixtures("either_way")

Optimizer = torch.optim.Optimizer
KINDS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=1.0, foreach=True),
    "loop": lambda params: torch.optim.SGD(params, lr=1.0, foreach=False),
}
ARGUMENTS = [{}, {"clip_norm": 1024.0}, {"clip_value": 1024.0}, {"norm": True}]


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=dtype))


def twice(kind: str, shared: nn.Parameter) -> Optimizer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        return KINDS[kind]([shared, shared])


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("edits", [True, False], ids=["unscaled", "step alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_listed_twice_is_divided_once(kind: str, edits: bool, arguments: dict[str, Any]) -> None:
    p = parameter()
    optimizer, scaler = twice(kind, p), LossScaler(policy=Static(1024.0))
    scaler.backward(p.sum())
    if edits:
        with scaler.unscaled(optimizer):
            pass
    result = scaler.step(optimizer, **arguments)
    assert p.tolist() == [-2.0, -2.0]  # torch updates it twice
    if result.grad_norm is not None:
        torch.testing.assert_close(result.grad_norm, torch.tensor(2.0).sqrt())


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("edits", [True, False], ids=["unscaled", "step alone"])
@pytest.mark.parametrize(
    "kinds", [("fused",), ("foreach",), ("fused", "fused"), ("fused", "loop"), ("loop", "foreach")]
)
def test_parameters_with_one_gradient_between_them_are_divided_once(
    kinds: tuple[str, ...], edits: bool, arguments: dict[str, Any]
) -> None:
    p, q, other = parameter(), parameter(), parameter()
    groups = [[p, q, other]] if len(kinds) == 1 else [[p, other], [q]]
    optimizers = [KINDS[kind](group) for kind, group in zip(kinds, groups, strict=True)]
    scaler = LossScaler(policy=Static(1024.0))
    scaler.backward((p + other).sum())
    q.grad = p.grad
    if edits:
        with scaler.unscaled(*optimizers):
            pass
    scaler.step(*optimizers, **arguments)
    assert p.tolist() == q.tolist() == other.tolist() == [-1.0, -1.0]


@pytest.mark.not_simulated("sparse tensors")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_sparse_gradients_that_are_shared_are_divided_once(arguments: dict[str, Any]) -> None:
    p, q = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(4, 1))
    optimizer, scaler = KINDS["loop"]([p, q]), LossScaler(policy=Static(1024.0))
    scaler.backward(nn.functional.embedding(torch.tensor([1, 1, 3]), p, sparse=True).sum())
    q.grad = p.grad
    scaler.step(optimizer, **arguments)
    assert p.flatten().tolist() == q.flatten().tolist() == [0.0, -2.0, 0.0, -1.0]


@pytest.mark.parametrize("kinds", [("fused", "fused"), ("fused", "loop"), ("loop", "fused"), ("loop", "foreach")])
@pytest.mark.parametrize("one_block", [True, False])
def test_a_parameter_of_two_optimizers_is_divided_once_in_unscaled(kinds: tuple[str, str], one_block: bool) -> None:
    p, q, shared = parameter(), parameter(), parameter()
    a, b = KINDS[kinds[0]]([p, shared]), KINDS[kinds[1]]([shared, q])
    scaler = LossScaler(policy=Static(1024.0))
    scaler.backward((p + q + shared).sum())
    for named in [(a, b)] if one_block else [(a,), (b,)]:
        with scaler.unscaled(*named):
            pass
    assert p.grad is not None
    assert q.grad is not None
    assert shared.grad is not None
    assert p.grad.tolist() == q.grad.tolist() == shared.grad.tolist() == [1.0, 1.0]
    scaler.step(a, b)
    assert (p.tolist(), q.tolist(), shared.tolist()) == ([-1.0, -1.0], [-1.0, -1.0], [-2.0, -2.0])


@pytest.mark.parametrize("policy", [Static(2.0**15), NoScaling()], ids=["Static", "NoScaling"])
def test_masters_beside_optimizers_that_share_a_parameter_divide_in_float32(policy: Policy) -> None:
    # 2**-26 is no FP16 number; FP16 holds it times 2**15.
    half, shared = parameter(torch.float16), parameter()
    masters = MasterWeights(torch.optim.SGD([half], lr=1.0))
    a, b = KINDS["fused"]([shared]), KINDS["loop"]([shared])
    scaler = LossScaler(policy=policy)
    scaler.backward((half.float() * (1.0 if isinstance(policy, NoScaling) else 2.0**-26)).sum() + shared.sum())
    scaler.step(masters, a, b, clip_norm=2.0**-24 if isinstance(policy, NoScaling) else None)
    ((_, value),) = masters.masters()
    if isinstance(policy, NoScaling):
        torch.testing.assert_close(value, torch.full((2,), -(2.0**-25)))  # the norm is 2
    else:
        assert value.tolist() == [-(2.0**-26)] * 2


@pytest.mark.parametrize("order", [1, -1], ids=["masters first", "masters last"])
def test_masters_that_share_a_parameter_with_half_gradients_are_refused_by_name(order: int) -> None:
    half = parameter(torch.float16)
    optimizers = [MasterWeights(torch.optim.SGD([half], lr=1.0)), torch.optim.SGD([half], lr=1.0)][::order]
    scaler = LossScaler(policy=Static(2.0**15))
    scaler.backward((half.float() * 2.0**-26).sum())
    with pytest.raises(TypeError, match=r"FP16 gradients: .*params\[0\].*`MasterWeights\(optimizer, grad_fp32=True\)`"):
        scaler.step(*optimizers)
    assert half.tolist() == [0.0, 0.0]
    assert half.grad is not None
    assert half.grad.tolist() == [2.0**-11] * 2


@needs_grad_dtype
@pytest.mark.parametrize("order", [1, -1], ids=["masters first", "masters last"])
def test_masters_with_float32_gradients_may_share_a_parameter(order: int) -> None:
    half = parameter(torch.float16)
    masters = MasterWeights(torch.optim.SGD([half], lr=1.0), grad_fp32=True)
    optimizers = [masters, torch.optim.SGD([half], lr=0.0)][::order]
    scaler = LossScaler(policy=Static(2.0**15))
    scaler.backward((half.float() * 2.0**-26).sum())
    scaler.step(*optimizers)
    assert half.grad is not None
    assert half.grad.tolist() == [2.0**-26] * 2
