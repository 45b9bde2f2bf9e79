"""`MasterWeights` on FP16 parameters that are DTensors, on two ranks, against the same on one."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.sharded import assert_same, found_on_ranks, full, local, poison_one_rank
from tests.torch.versions import needs_grad_dtype, needs_sharding_on_cpu
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import LossScaler, MasterWeights
from gradscale.torch.compat import has_grad_dtype
from gradscale.torch.masters import Storage

KINDS = ("fsdp", "hsdp", "tp")
MARKED = [pytest.param(kind, marks=() if kind == "tp" else needs_sharding_on_cpu) for kind in KINDS]
STORAGES: tuple[Storage, ...] = ("fp32", "remainder", "kahan", "stochastic")
EXACT: tuple[Storage, ...] = ("fp32", "remainder", "kahan")

Inner = Callable[[Any], torch.optim.Optimizer]
Run = tuple[nn.Module, MasterWeights, LossScaler]


class Sums(nn.Module):
    """Two linear layers and a shift, added up: gradients do not depend on the weights."""

    def __init__(self) -> None:
        super().__init__()
        # Five rows and columns: the ranks' parts are not of one size. One row: rank 1 has nothing of it.
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, :4]) + self.second(x) + self.shift


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Sums().half()
    if kind == "one":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind == "tp":
        # The shift stays a plain parameter.
        columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"first": columns, "second": rows})
        return model
    shape, names = ((2,), ("shard",)) if kind == "fsdp" else ((2, 1), ("replicate", "shard"))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def loss_of(model: nn.Module, kind: str, step: int) -> Tensor:
    """Returns a loss whose gradients are quarters of small whole numbers, which FP16 holds at any scale used here."""
    rows = torch.arange(20.0).reshape(4, 5).remainder(3 + step % 2) - 1
    targets = torch.arange(20.0).reshape(4, 5).remainder(4) - 2
    if kind in ("fsdp", "hsdp"):
        rows, targets = (part.chunk(2)[dist.get_rank()] for part in (rows, targets))
    return (model(rows.half()).float() * targets).mean(0).sum()


def exact_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Powers of two, so that float32 holds every update."""
    return torch.optim.SGD(parameters, lr=2.0**-9, momentum=0.5)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def setup(kind: str, storage: Storage, inner: Inner, **options: Any) -> Run:
    model = model_of(kind)
    optimizer = MasterWeights(inner(model.parameters()), storage, **options)
    return model, optimizer, LossScaler(model, Dynamic(init_scale=1024.0))


def train(run: Run, kind: str, steps: range, clip_norm: float | None = None) -> list[str]:
    """Trains; the gradients of step 1 overflow on one rank. Returns the statuses."""
    model, optimizer, scaler = run
    statuses = []
    for step in steps:
        scaler.backward(loss_of(model, kind, step))
        if step == 1:
            poison_one_rank(model.first.weight)  # type: ignore[arg-type]
        statuses.append(str(scaler.step(optimizer, clip_norm=clip_norm).status()))
        optimizer.zero_grad()
    return statuses


def masters_of(optimizer: MasterWeights) -> list[Tensor]:
    return [full(value) for _, value in optimizer.masters()]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [full(weight) for weight in model.parameters()]


def parts_of(run: Run) -> list[Tensor]:
    """Returns copies of what this rank holds of weights, masters and the inner optimizer's state."""
    model, optimizer, _ = run
    states = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    tensors = [*model.parameters(), *(value for _, value in optimizer.masters()), *states]
    return [local(tensor.detach()).clone() for tensor in tensors]


def trained_exactly(kind: str, storage: Storage) -> Any:
    run = setup(kind, storage, exact_sgd)
    return train(run, kind, range(5)), masters_of(run[1]), weights_of(run[0])


def trained_by_adamw(kind: str, storage: Storage) -> Any:
    run = setup(kind, storage, fused_adamw)
    return train(run, kind, range(5), clip_norm=0.5), masters_of(run[1])


def resumed(kind: str, storage: Storage) -> Any:
    """Two runs: one that goes on, one that is loaded in between."""
    run, other = (setup(kind, storage, fused_adamw, **({"seed": 3} if storage == "stochastic" else {})) for _ in "ab")
    train(run, kind, range(3))
    saved = copy.deepcopy(run[1].state_dict())
    other[0].load_state_dict(run[0].state_dict())
    other[1].load_state_dict(saved)
    other[2].load_state_dict(run[2].state_dict())
    for each in (run, other):
        train(each, kind, range(3, 5))
    return parts_of(run), parts_of(other)


def through_checkpoint(kind: str, storage: Storage, whole: bool) -> Any:
    """The same by `torch.distributed.checkpoint`, with parts of parameters or with whole ones."""
    from torch.distributed.checkpoint import state_dict as checkpoint

    options = checkpoint.StateDictOptions(full_state_dict=whole)
    # Not fused: whole moments that torch 2.6 has loaded have gaps, which its fused kernel walks through.
    run, other = (setup(kind, storage, partial(torch.optim.AdamW, lr=1e-2)) for _ in "ab")
    train(run, kind, range(3))
    saved = copy.deepcopy(checkpoint.get_state_dict(run[0], run[1], options=options))
    checkpoint.set_state_dict(other[0], other[1], model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    other[2].load_state_dict(run[2].state_dict())
    for each in (run, other):
        train(each, kind, range(3, 5))
    return parts_of(run), parts_of(other)


def rounded_stochastically(kind: str, storage: Storage) -> Any:
    """Weights of 1 after a step by a quarter of the distance to the next number."""
    if kind != "tp":
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    # Rank 0 holds more of the first than rank 1 does, and both must still round the second alike.
    wholes = [torch.ones(401, 8).half(), torch.ones(400).half()]
    placed = [distribute_tensor(wholes[0], mesh, [Shard(0)]), distribute_tensor(wholes[1], mesh, [Replicate()])]
    parameters = [nn.Parameter(tensor) for tensor in placed]
    optimizer = MasterWeights(torch.optim.SGD(parameters, lr=2.0**-12), storage, seed=1)
    for parameter in parameters:
        parameter.grad = -torch.ones_like(parameter)
    optimizer.step()
    return [local(parameter.detach()).clone() for parameter in parameters]


def edited(kind: str, storage: Storage) -> Any:
    """Float32 gradients that are clipped by value, unscaled and edited."""
    if kind in ("fsdp", "hsdp") or not has_grad_dtype():
        return None
    model, optimizer, scaler = setup(kind, storage, exact_sgd, grad_fp32=True)
    scaler.backward(loss_of(model, kind, 0))
    with scaler.unscaled(optimizer):
        for weight in model.parameters():
            cast(Tensor, weight.grad).mul_(0.5)
    status = str(scaler.step(optimizer, clip_value=0.25).status())
    return status, masters_of(optimizer)


CASES: dict[str, Callable[[str], Any]] = {
    **{f"exact {storage}": partial(trained_exactly, storage=storage) for storage in EXACT},
    **{f"adamw {storage}": partial(trained_by_adamw, storage=storage) for storage in EXACT},
    **{f"resumed {storage}": partial(resumed, storage=storage) for storage in STORAGES},
    **{
        f"checkpoint {storage} {'whole' if whole else 'parts'}": partial(
            through_checkpoint, storage=storage, whole=whole
        )
        for storage in EXACT
        for whole in (False, True)
    },
    "rounded": partial(rounded_stochastically, storage="stochastic"),
    "edited": partial(edited, storage="fp32"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_on_ranks(tmp_path_factory.mktemp("masters"), CASES, KINDS)


@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("storage", EXACT)
def test_masters_are_bit_exactly_those_of_one_rank(storage: Storage, kind: str, found: Any) -> None:
    expected = trained_exactly("one", storage)
    assert expected[0] == ["applied", "overflow", "applied", "applied", "applied"]
    for each in found:
        assert_same(each[f"exact {storage}", kind], expected)


@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("storage", EXACT)
def test_masters_of_a_fused_kernel_and_a_clip_are_those_of_one_rank(storage: Storage, kind: str, found: Any) -> None:
    expected = trained_by_adamw("one", storage)
    for each in found:
        assert_same(each[f"adamw {storage}", kind], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("resumed", "checkpoint"))])
def test_a_resumed_run_goes_on_bit_exactly(name: str, kind: str, found: Any) -> None:
    for each in found:
        went_on, loaded = each[name, kind]
        assert_same(loaded, went_on)


def test_replicas_are_rounded_alike_and_parts_by_different_random_numbers(found: Any) -> None:
    (part, replica), (other_part, other_replica) = (each["rounded", "tp"] for each in found)
    assert torch.equal(replica, other_replica)
    assert part.shape == (201, 8)
    assert not torch.equal(part[:200], other_part)
    for rounded in (part, other_part):
        # A quarter of 1,600, within six standard deviations: sqrt(1600 / 4 * 3 / 4) is 17.
        assert abs(int((rounded > 1).sum()) - 400) < 104


@needs_grad_dtype
def test_float32_gradients_of_tensor_parallel_parameters_can_be_edited(found: Any) -> None:
    expected = edited("one", "fp32")
    for each in found:
        assert_same(each["edited", "tp"], expected)


def placed_otherwise(sharded: bool) -> Tensor:
    """Returns the weights after a step with a gradient that is whole on every rank, of a parameter in shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight: Any = torch.arange(6.0).reshape(3, 2).half()
    parameter: Any = nn.Parameter(
        distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)]) if sharded else weight
    )
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=0.125))
    scaler = LossScaler(policy=Dynamic(init_scale=4.0))
    loss: Any = (parameter * 2).sum()
    scaler.backward(loss.full_tensor() if sharded else loss)
    scaler.step(optimizer)
    return full(parameter)


def test_gradients_that_are_placed_otherwise_than_their_parameter_are_applied(tmp_path: Path) -> None:
    for found in run_ranks(2, placed_otherwise, True, folder=tmp_path):
        assert_same(found, placed_otherwise(False))


def rounded_under_ddp() -> Tensor:
    """Returns the weights of a replica after three steps, on a rank that has a seed of its own, as many programs do."""
    model = nn.Linear(16, 16).bfloat16()
    nn.init.ones_(model.weight)
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(100 + dist.get_rank())
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=2.0**-10), "stochastic")
    scaler = LossScaler(parallel, Dynamic(init_scale=4.0))
    for _ in range(3):
        scaler.backward(parallel(torch.ones(1, 16).bfloat16()).float().sum())
        scaler.step(optimizer)
        optimizer.zero_grad()
    return model.weight.detach().clone()


def test_replicas_are_rounded_alike_whatever_the_seed_of_each_rank(tmp_path: Path) -> None:
    one, other = run_ranks(2, rounded_under_ddp, folder=tmp_path)
    assert 0 < int((one < 1).sum()) < one.numel()
    assert torch.equal(one, other)
