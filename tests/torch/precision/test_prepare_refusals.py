"""Errors of `prepare`, which change nothing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import small_model, weights
from tests.torch.precision.refusals import refused
from tests.torch.process_group import end_process_group
from tests.torch.versions import needs_sharding_on_cpu
from torch import nn

from gradscale.torch import O2, MasterWeights, prepare

SGD = torch.optim.SGD


@pytest.fixture(scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("_ranks")
def test_a_model_in_ddp() -> None:
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    message = r"must come before DistributedDataParallel, .* Received: Distributed.*Prepare the plain model, then wrap"
    refused(RuntimeError, message, wrapped, SGD(model.parameters()), "O1", model)


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("_ranks")
def test_a_model_that_is_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match=r"must come before fully_shard"):
        prepare(model, SGD(model.parameters()), "O1")


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("_ranks")
def test_a_model_that_is_prepared_can_be_wrapped_in_ddp_and_trained() -> None:
    model = small_model()
    model, optimizer, scaler = prepare(model, SGD(model.parameters(), lr=0.1), "O2")
    wrapped = nn.parallel.DistributedDataParallel(model)
    before = weights(model)
    for _ in range(4):
        scaler.backward(wrapped(torch.ones(2, 4)).square().mean())
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert wrapped(torch.ones(2, 4)).dtype is torch.float32
    assert not any(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.cpu_only("gloo, which has no other device")
@needs_sharding_on_cpu
@pytest.mark.usefixtures("_ranks")
def test_a_model_that_is_prepared_can_be_sharded_and_its_optimizer_built_then() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, nothing, scaler = prepare(small_model(), None, "O1")
    assert nothing is None
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = SGD(model.parameters(), lr=0.1)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    scaler.backward(model(torch.ones(2, 4)).square().mean())
    assert not scaler.step(optimizer).skipped()
    after = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_with_a_wrapped_part() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    refused(
        RuntimeError, r"must come before DataParallel, .* Received: DataParallel at '0'", model, SGD(model.parameters())
    )


def test_a_compiled_model() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match=r"must come before torch.compile"):
        prepare(compiled, SGD(model.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["O0", "O1", "O2"])
@pytest.mark.parametrize("second", ["O0", "O1", "O2"])
def test_a_model_that_has_been_prepared(first: str, second: str) -> None:
    model = small_model()
    optimizer = SGD(model.parameters())
    prepare(model, optimizer, first)
    refused(RuntimeError, r"changes a model once, .* Received: Sequential\.", model, SGD(model.parameters()), second)


def test_a_model_with_a_part_that_has_been_prepared() -> None:
    part = small_model()
    prepare(part, SGD(part.parameters()), "O1")
    model = nn.Sequential(part)
    refused(RuntimeError, r"changes a model once, .* Received: Sequential at '0'", model, SGD(model.parameters()))


def test_a_model_whose_forward_was_replaced() -> None:
    model = small_model()
    model.forward = lambda input: input  # type: ignore[method-assign]
    refused(RuntimeError, r"this `forward` was replaced on the object itself", model, SGD(model.parameters()))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_not_float32(level: str, dtype: torch.dtype) -> None:
    model = small_model()
    model[2].to(dtype)
    message = rf"takes a float32 model and casts it itself.* Received: '2.weight' in {dtype}. .*`model.float\(\)`"
    refused(ValueError, message, model, SGD(model.parameters()), level)


def test_a_frozen_part_in_another_half_type() -> None:
    model = small_model()
    model[0].bfloat16().requires_grad_(False)
    refused(ValueError, r"Received: '0.weight' in torch.bfloat16", model, SGD(model[2].parameters()), "O1")


def test_an_optimizer_of_another_model() -> None:
    model, other = small_model(0), small_model(1)
    message = r"must belong to the models given. Received: SGD with param_groups\[0\].params\[0\], .*, which do not"
    refused(ValueError, message, model, SGD(other.parameters()), "O2", other)


def test_an_optimizer_that_also_holds_another_model() -> None:
    model, other = small_model(0), small_model(1)
    optimizer = SGD([*model.parameters(), other[0].get_parameter("bias")])
    refused(ValueError, r"Received: SGD with param_groups\[0\].params\[4\], which do not", model, optimizer)


def test_the_second_of_two_optimizers_that_does_not_belong() -> None:
    model, other = small_model(0), small_model(1)
    optimizers = [SGD(model.parameters()), SGD(other.parameters())]
    refused(ValueError, "must belong to the models given", model, optimizers, "O2", other)


def test_an_optimizer_with_masters_already() -> None:
    model = small_model()
    optimizer = MasterWeights(SGD(model.parameters()))
    refused(TypeError, "keeps masters already", model, optimizer)


def test_an_optimizer_that_masters_cannot_wrap() -> None:
    model = small_model()
    refused(TypeError, "LBFGS evaluates the loss itself", model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_with_a_scheduler_built_on_it() -> None:
    model = small_model()
    optimizer = SGD(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused(ValueError, "A scheduler has been built on this optimizer", model, optimizer)


@pytest.mark.parametrize("optimizer", [[], 3, [None]])
def test_what_is_no_optimizer(optimizer: Any) -> None:
    refused(
        TypeError,
        r"must be a torch optimizer of the model's parameters, a list .* Received: ",
        small_model(),
        optimizer,
    )


def test_what_is_no_model() -> None:
    model = small_model()
    for wrong in (3, [3]):
        with pytest.raises(TypeError, match="must be a module"):
            prepare(wrong, SGD(model.parameters()))  # type: ignore[call-overload]


def test_a_pattern_that_matches_nothing() -> None:
    model = small_model()
    precision = replace(O2, keep_fp32=("0", "haed*"))
    refused(
        ValueError,
        r"must match a module.* Received: 'haed\*', which match none",
        model,
        SGD(model.parameters()),
        precision,
    )


def test_a_pattern_matches_in_one_of_several_models() -> None:
    models = [small_model(), nn.Sequential(nn.Linear(2, 2))]
    optimizer = SGD([value for model in models for value in model.parameters()])
    prepare(models, optimizer, replace(O2, keep_fp32=("2",)))
    assert models[0][2].get_parameter("weight").dtype is torch.float32


def test_an_unknown_storage_of_masters() -> None:
    model = small_model()
    precision = replace(O2, master_weights="fp64")  # type: ignore[arg-type]
    refused(ValueError, r"`storage` must be .* Received: .*'fp64'", model, SGD(model.parameters()), precision)


def test_an_unknown_level() -> None:
    model = small_model()
    refused(ValueError, r"`precision` must be .* Received: precision='O9'", model, SGD(model.parameters()), "O9")


def test_swapped_arguments_are_to_be_swapped() -> None:
    swapped: Any = prepare
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"model first, then its optimizer\. Received: SGD, .* Swap them: `prepare"):
        swapped(optimizer, model)
    with pytest.raises(TypeError, match=r"must be a torch optimizer of the model's parameters"):
        swapped(model, model)
