"""Small models whose parameters are DTensors on two ranks, and cases that run on both of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

KINDS = ("fsdp", "hsdp", "tp", "loss parallel")
"""FSDP2 with one group of parameters; FSDP2 with replicas, and a group for each layer; tensor parallel, with plain and
DTensor parameters together; and tensor parallel up to the loss, which is a DTensor."""

Cases = Mapping[str, Callable[[str], Any]]


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns a model with the same weights whatever its kind; plain for `"one"`."""
    torch.manual_seed(0)
    # The first dimension of the last weight is odd: rank 0 holds two rows of it and rank 1 one.
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    if kind in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # With two ranks, replicas of shards are two replicas of one shard.
        shape, names = ((2,), ("shard",)) if kind == "fsdp" else ((2, 1), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (model,) if kind == "fsdp" else (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    elif kind != "one":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        last = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()} if kind == "tp" else {"2": last}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]
    return model


def loss_of(model: nn.Module, kind: str, step: int = 0) -> Tensor:
    """Returns the loss of this rank's rows: half of the batch under FSDP, else all of it."""
    dtype = next(model.parameters()).dtype
    rows = torch.linspace(-1, 1, 16).reshape(4, 4).to(dtype) * (1 + step)
    classes = torch.tensor([0, 1, 2, 1])
    if kind in ("fsdp", "hsdp"):
        rows, classes = (part.chunk(2)[dist.get_rank()] for part in (rows, classes))
    return nn.functional.cross_entropy(model(rows).float(), classes)


def backward_of(kind: str) -> AbstractContextManager[Any]:
    """Returns the block that forward and backward passes of a kind need."""
    if kind != "loss parallel":
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def local(tensor: Any) -> Any:
    """Returns what this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Any) -> Tensor:
    """Returns a copy of the whole tensor, on every rank."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights_of(model: nn.Module) -> list[Tensor]:
    """Returns the whole weights."""
    return [full(parameter) for parameter in model.parameters()]


def on_first_rank() -> bool:
    """Returns whether this is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def poison_one_rank(parameter: Tensor) -> None:
    """Writes an inf into the gradient on the first rank alone."""
    if on_first_rank():
        local(parameter.grad).view(-1)[0] = torch.inf


def assert_same(found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raises unless numbers and tensors in two nested results are close, and everything else in them is equal."""
    found_leaves, expected_leaves = tree_leaves(found), tree_leaves(expected)
    assert list(map(_text, found_leaves)) == list(map(_text, expected_leaves))
    for one, other in zip(found_leaves, expected_leaves, strict=True):
        if isinstance(one, Tensor | float):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _text(leaf: Any) -> str:
    """Returns a leaf as text; of a tensor or a float, which may be rounded differently, only its kind."""
    return type(leaf).__name__ if isinstance(leaf, Tensor | float) else str(leaf)


def found_on_ranks(folder: Path, cases: Cases, kinds: tuple[str, ...] = KINDS) -> list[dict[tuple[str, str], Any]]:
    """Returns what every case returns for every kind, or the text of its error, for each of two ranks."""
    return run_ranks(2, _outcomes, cases, kinds, folder=folder)


def _outcomes(cases: Cases, kinds: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    return {(name, kind): _outcome(case, kind) for kind in kinds for name, case in cases.items()}


def _outcome(case: Callable[[str], Any], kind: str) -> Any:
    try:
        return case(kind)
    except Exception as error:  # the other cases are run all the same
        return f"{type(error).__name__}: {error}"
