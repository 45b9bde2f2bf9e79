"""The calls of `docs/use/recipes.md` on two ranks, with stand-ins for torchtitan and nanochat."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.sharded import assert_same, full
from tests.torch.versions import needs_sharding_on_cpu
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

STEPS, BAD = 5, 2


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(8.0).reshape(4, 2) / 8), nn.Parameter(torch.ones(2))]


class Averaging(torch.optim.Optimizer):
    """Averages the gradients of all ranks inside of `step`, as nanochat's optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.125})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / dist.get_world_size())


def loss_of(parameters: Any, step: int, advantage: float = 1.0) -> Tensor:
    """Returns a loss whose gradients are small multiples of powers of two, and others on each rank."""
    x = torch.tensor([[1.0, 2.0, -1.0, 0.5]]) * (1 + dist.get_rank()) * (1 + step % 2)
    return (x @ parameters[0] * parameters[1].detach() + parameters[1]).sum() * advantage


def spoiled(parameters: Any, step: int) -> None:
    if step == BAD and dist.get_rank() == 1:
        parameters[0].grad[0, 0] = INF


def nanochat(kind: str) -> Any:
    """Trains with what differs between the recipes, and returns weights and scales."""
    parameters = weights()
    optimizer = Averaging(parameters)
    rule = Dynamic(init_scale=64.0, growth_interval=2)
    passes = 2 if kind == "reinforcement learning" else 1
    drop_in: Any = {
        "flags by hand": lambda: GradScaler("cpu", init_scale=64.0, growth_interval=2),
        "group": lambda: GradScaler("cpu", policy=rule, group=dist.group.WORLD),
    }.get(kind, lambda: None)()
    scaler = LossScaler(policy=rule)
    scales = []
    for step in range(STEPS):
        for number in range(passes):
            # The advantages of a whole pass may be zero.
            loss = loss_of(parameters, step, advantage=1.0 if number == 0 else 0.0)
            (scaler.backward(loss) if drop_in is None else drop_in.scale(loss).backward())
        spoiled(parameters, step)
        if drop_in is None:
            scaler.step(optimizer)
        else:
            drop_in.unscale_(optimizer)
            for flag in drop_in._found_inf_per_device(optimizer).values() if kind == "flags by hand" else ():
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            drop_in.step(optimizer)
            drop_in.update()
        optimizer.zero_grad()
        scales.append(scaler.metrics()["scale"] if drop_in is None else drop_in.get_scale())
    return [each.detach().clone() for each in parameters], scales


def without_a_scale() -> Any:
    parameters = weights()
    optimizer = Averaging(parameters)
    for step in range(STEPS):
        if step != BAD:
            loss_of(parameters, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in parameters]


NANOCHAT = ("flags by hand", "group", "fine-tuning", "reinforcement learning")


def all_of_nanochat() -> Any:
    return without_a_scale(), {kind: nanochat(kind) for kind in NANOCHAT}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(2, all_of_nanochat, folder=tmp_path_factory.mktemp("nanochat"))


@pytest.mark.parametrize("kind", NANOCHAT)
def test_recipes_for_nanochat_skip_together_and_train_as_without_a_scale(kind: str, found: Any) -> None:
    for expected, recipes in found:
        assert_same(recipes[kind][0], expected)
        assert recipes[kind][1] == [64.0, 128.0, 64.0, 64.0, 128.0]


def clips_own_gradients() -> str:
    parameters = weights()
    scaler = LossScaler(policy=Dynamic(init_scale=64.0))
    scaler.backward(loss_of(parameters, 0))
    with pytest.raises(RuntimeError) as raised:
        scaler.step(Averaging(parameters), clip_norm=1.0)
    return str(raised.value)


def test_norm_of_gradients_that_the_optimizer_is_to_average_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, clips_own_gradients, folder=tmp_path):
        assert "plain gradients that differ between ranks" in text


class Container(torch.optim.Optimizer):
    """An optimizer that steps one for each part of the model, as torchtitan's container does."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.125) for part in parts]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5) for each in self.optimizers]
        super().__init__([parameter for part in parts for parameter in part.parameters()], {})

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def advance(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def titan_of(ranks: int) -> Any:
    """Trains two parts of a model as torchtitan does, and returns weights, norms, rates, hooks called and the scale."""
    torch.manual_seed(0)
    parts: Any = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if ranks > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for part in parts:
            fully_shard(part, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    container, norms, hooked = Container(parts), [], []
    container.register_step_post_hook(lambda *_: hooked.append(True))
    scaler = LossScaler(parts, Dynamic(init_scale=64.0, growth_interval=2))
    guard = scaler.guard(container.advance)
    for step in range(STEPS):
        container.zero_grad()
        rows = torch.arange(16.0).reshape(4, 4).remainder(5 + step) / 8
        rows = rows.chunk(2)[dist.get_rank()] if ranks > 1 else rows
        for half in rows.chunk(2):
            scaler.backward(parts[1](parts[0](half)).square().mean() / 2)
        if step == BAD and (ranks == 1 or dist.get_rank() == 1):
            grad = parts[1].weight.grad
            (grad.to_local() if ranks > 1 else grad)[0, 0] = INF
        norms.append(float(scaler.step(container, clip_norm=0.05).grad_norm))  # type: ignore[arg-type]
        guard.step()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in container.optimizers]
    weights = [full(each) for part in parts for each in part.parameters()]
    return weights, norms, rates, len(hooked), scaler.metrics()["scale"]


@needs_sharding_on_cpu
def test_recipe_for_torchtitan_trains_on_shards_as_on_one_rank(tmp_path: Path) -> None:
    expected = titan_of(1)
    assert expected[1][BAD] == INF
    assert expected[2:] == ([0.125 * 0.5**4] * 2, 4, 128.0)
    for found in run_ranks(2, titan_of, 2, folder=tmp_path):
        assert_same(found[0], expected[0], rtol=1e-6, atol=1e-7)
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        assert found[2:] == expected[2:]
