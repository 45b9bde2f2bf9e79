"""Gradients of every type and layout: each is unscaled, and none is applied that is not finite."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, give
from torch import Tensor, nn

from gradscale import NoScaling, Static
from gradscale.torch import LossScaler, StepResult

pytestmark = pytest.mark.usefixtures("either_way")

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "complex64": lambda x: torch.complex(x, -x),
    "complex128": lambda x: torch.complex(x.double(), -x.double()),
    "0-d": lambda x: x[0],
    "transposed": lambda x: x.repeat(3, 1).t(),
    "strided": lambda x: x.repeat_interleave(2)[::2],
    "one large": lambda x: x.repeat(40_000 // x.numel()),
    "large and transposed": lambda x: x.repeat(200, 200).t(),
}

SCALE = 2.0**10


def stepped(grad: Tensor, **kwargs: Any) -> tuple[Tensor, bool]:
    """Returns the weight after an SGD step from zero with `grad`, still scaled; and whether it was skipped."""
    weight = nn.Parameter(torch.zeros_like(grad))
    scaler = LossScaler(policy=Static(SCALE))
    give(scaler, [weight], [grad.clone(memory_format=torch.preserve_format)])
    result = scaler.step(torch.optim.SGD([weight], lr=1.0, foreach=False), **kwargs)
    return weight.detach(), result.skipped()


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_layout_is_unscaled(kind: str) -> None:
    grad = KINDS[kind](torch.tensor([3.0, -4.0, 0.5, 0.0]))
    weight, skipped = stepped(grad)
    assert not skipped
    assert torch.equal(weight, -grad / SCALE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_layout_is_clipped_by_the_norm_of_all_its_elements(kind: str) -> None:
    grad = KINDS[kind](torch.tensor([3.0, -4.0, 0.5, 0.0]))
    norm = torch.linalg.vector_norm(grad.to(torch.complex128 if grad.is_complex() else torch.float64)).item() / SCALE
    weight, skipped = stepped(grad, clip_norm=norm / 2)
    assert not skipped
    expected = (-grad / SCALE) * (norm / 2 / (norm + 1e-6))
    torch.testing.assert_close(weight, expected, rtol=1e-2 if kind == "bfloat16" else 1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_and_layout_is_clipped_by_value(kind: str) -> None:
    grad = KINDS[kind](torch.tensor([3.0, -4.0, 0.5, 0.0]))
    weight, _ = stepped(grad, clip_value=1 / SCALE)
    true = -grad / SCALE
    parts = [true.real, true.imag] if true.is_complex() else [true]
    found = [weight.real, weight.imag] if weight.is_complex() else [weight]
    for one, other in zip(found, parts, strict=True):
        assert torch.equal(one, other.clamp(-1 / SCALE, 1 / SCALE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("norm", [True, False])
def test_a_bad_element_of_any_type_anywhere_is_seen(kind: str, bad: float, norm: bool) -> None:
    plain = torch.tensor([3.0, -4.0, 0.5, 1.0])
    for position in {0, 3} - ({3} if kind == "0-d" else set()):
        values = plain.clone()
        values[position] = bad
        weight, skipped = stepped(KINDS[kind](values), **({"clip_norm": 1.0} if norm else {}))
        assert skipped
        assert not weight.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_any_type_makes_the_norm_nan_and_does_not_clip_other_gradients_to_zero(kind: str) -> None:
    bad, good = KINDS[kind](torch.tensor([NAN, 1.0, 1.0, 1.0])), torch.tensor([3.0])
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in (bad, good)]
    scaler = LossScaler(policy=NoScaling())
    give(scaler, parameters, [bad, good])
    result = scaler.step(torch.optim.SGD(parameters, lr=1.0), clip_norm=1.0)
    assert result.grad_norm is not None
    assert result.grad_norm.isnan()
    assert parameters[1].item() != 0.0


@pytest.mark.parametrize("beside", [torch.float64, torch.complex128])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_float32_gradient_that_overflows_once_unscaled_is_seen_beside_a_wider_one(
    beside: torch.dtype, foreach: bool, steps_before: int
) -> None:
    grads = [torch.tensor([2.0**126]), torch.ones(1, dtype=beside)]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    scaler, optimizer = LossScaler(policy=Static(2.0**-4)), torch.optim.SGD(parameters, lr=1.0, foreach=foreach)
    for _ in range(steps_before):
        give(scaler, parameters, [torch.zeros_like(grad) for grad in grads])
        scaler.step(optimizer)
        optimizer.zero_grad()
    give(scaler, parameters, grads)
    assert scaler.step(optimizer).status() == "overflow"
    assert [parameter.item() for parameter in parameters] == [0.0, 0.0]


def test_an_imaginary_part_alone_can_overflow() -> None:
    _, skipped = stepped(torch.complex(torch.ones(2), torch.tensor([1.0, INF])))
    assert skipped


def test_a_conjugate_view_is_unscaled_clipped_and_checked() -> None:
    choices: list[dict[str, Any]] = [{}, {"clip_norm": 1e9}, {"clip_value": 1e9}]
    for arguments in choices:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        scaler = LossScaler(policy=Static(2.0))
        give(scaler, [weight], [torch.tensor([3.0 + 4.0j, 1.0j]).conj()])
        assert weight.grad is not None
        assert weight.grad.is_conj()
        scaler.step(torch.optim.SGD([weight], lr=1.0, foreach=False), **arguments)
        assert torch.equal(weight.detach(), torch.tensor([-1.5 + 2.0j, 0.5j]))


def test_an_empty_parameter_is_no_trouble() -> None:
    for norm in (True, False):
        empty, weight = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(1))
        scaler = LossScaler(policy=Static(2.0))
        give(scaler, [empty, weight], [torch.zeros(0, 3), torch.ones(1)])
        assert not scaler.step(torch.optim.SGD([empty, weight], lr=1.0), norm=norm).skipped()
        assert weight.item() == -0.5


def test_types_may_be_mixed_in_one_step() -> None:
    grads = [kind(torch.tensor([3.0, -4.0, 0.5, 0.0])) for kind in KINDS.values()]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = LossScaler(policy=Static(SCALE))
    give(scaler, parameters, [grad.clone() for grad in grads])
    assert not scaler.step(optimizer, clip_norm=1e9).skipped()
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(parameter.detach(), -grad / SCALE, rtol=1e-6, atol=0)
    optimizer.zero_grad()
    give(scaler, parameters, [grad.clone() for grad in grads[:-1]] + [grads[-1] * NAN])
    assert len(scaler.step(optimizer).culprits()) == 1


def sparse(indices: list[int], values: list[list[float]]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), (4, 2), check_invariants=True)


def sparse_step(grad: Tensor, **kwargs: Any) -> tuple[nn.Parameter, StepResult]:
    weight = nn.Parameter(torch.zeros(4, 2))
    scaler = LossScaler(policy=Static(2.0))
    give(scaler, [weight], [grad])
    return weight, scaler.step(torch.optim.SGD([weight], lr=1.0, foreach=False), **kwargs)


@pytest.mark.not_simulated("sparse tensors")
def test_sparse_gradients_are_unscaled_and_clipped_with_their_duplicates_added_up() -> None:
    grad = sparse([1, 1, 3], [[2.0, 0.0], [4.0, 0.0], [0.0, 8.0]])
    assert not grad.is_coalesced()
    weight, _ = sparse_step(grad.clone())
    assert weight.tolist() == [[0, 0], [-3, 0], [0, 0], [0, -4]]
    weight, result = sparse_step(grad.clone(), clip_norm=1.0)
    assert result.grad_norm is not None
    assert result.grad_norm.item() == 5.0
    torch.testing.assert_close(weight[3, 1].item(), -0.8)


@pytest.mark.not_simulated("sparse tensors")
def test_duplicates_of_a_sparse_gradient_that_overflow_together_are_seen() -> None:
    weight, result = sparse_step(sparse([1, 1], [[3e38, 0.0], [3e38, 0.0]]))
    assert result.skipped()
    assert not weight.any()
    assert [(culprit.kind, culprit.count) for culprit in result.culprits()] == [("inf", 1)]


@pytest.mark.not_simulated("sparse tensors")
def test_a_sparse_gradient_of_a_real_embedding_trains() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    scaler = LossScaler(embedding, Static(256.0))
    losses = []
    for _ in range(20):
        loss = (embedding(torch.tensor([1, 1, 5])) ** 2).mean()
        losses.append(loss.item())
        scaler.backward(loss)
        scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2


def half_step(value: float, scale: float, fused: bool, steps_before: int = 0) -> tuple[float, bool]:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = LossScaler(policy=Static(scale))
    skipped = False
    for each in [*([0.0] * steps_before), value]:
        give(scaler, [weight], [torch.tensor([each, 0.0], dtype=torch.float16)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skipped = scaler.step(optimizer).skipped()
        optimizer.zero_grad()
    return weight[0].item(), skipped


@pytest.mark.parametrize("fused", [True, False])
def test_half_gradients_are_unscaled_in_float32(fused: bool) -> None:
    assert half_step(65504.0, 2.0**28, fused) == (-65504 * 2.0**-28, False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1])  # the first step measures sizes, the second need not
def test_half_gradients_that_only_overflow_once_unscaled_are_not_applied(fused: bool, steps_before: int) -> None:
    assert half_step(1024.0, 2.0**-6, fused, steps_before) == (0.0, True)
    assert half_step(1000.0, 2.0**-6, fused, steps_before) == (-64000.0, False)


def test_half_parameters_are_warned_of_once_by_name() -> None:
    model = nn.Linear(2, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Static(16.0))
    scaler.backward(model(torch.ones(1, 2, dtype=torch.float16)).sum())
    with pytest.warns(
        UserWarning, match=r"are FP16: weight, bias\..*wrap their optimizer in `gradscale\.torch\.MasterWeights`\."
    ) as caught:
        scaler.step(optimizer)
    assert caught[0].filename == __file__
    optimizer.zero_grad()
    scaler.backward(model(torch.ones(1, 2, dtype=torch.float16)).sum())
    scaler.step(optimizer)


def test_a_warning_about_many_parameters_names_five() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).half()
    scaler = LossScaler(model, Static(16.0))
    scaler.backward(model(torch.ones(1, 2, dtype=torch.float16)).sum())
    with pytest.warns(UserWarning, match=r"FP16: 0\.weight, 0\.bias, 1\.weight, 1\.bias, 2\.weight and 3 more\."):
        scaler.step(torch.optim.SGD(model.parameters()))
