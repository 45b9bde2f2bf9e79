"""Runs on two ranks: `Trainer` and `Fabric` with DDP and with FSDP2, clipped, with an overflow on one rank."""

import os
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations.lightning.runs import L, Regression, ours, trainer_of
from tests.torch.ranks.launch import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.integrations.lightning import FabricMixedPrecision, MixedPrecision
from gradscale.torch.gradients import local

RANKS = 2


def as_torchrun() -> None:
    """Sets what Lightning reads of a process that `torchrun` has started."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class Whole(Regression):
    """Spread by DDP; on one rank the gradients of the second batch are not finite."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, interval="step")

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        assert loss is not None
        # A hook, so that the inf is there before DDP reduces the gradients.
        loss.register_hook(lambda grad: grad * torch.inf if index == 1 and dist.get_rank() == 1 else grad)
        return loss


class Sharded(Regression):
    """Spread by FSDP2; on one rank the shard of the second batch's gradient is not finite."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, interval="step")

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def on_after_backward(self) -> None:
        if self.batches == 1 and dist.get_rank() == 1:
            local(next(self.net.parameters()).grad)[0] = torch.inf  # type: ignore[index]
        self.batches += 1


def strategy_of(kind: type) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    return DDPStrategy() if kind is Whole else ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)


def numbers(module: nn.Module) -> list[float]:
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in module.parameters()]
    return [number for each in whole for number in each.flatten().tolist()]


def trained(module_of: type, kind: str, policy: str | None, folder: Path) -> Any:
    """Returns what a rank knows after an epoch, a checkpoint, and an epoch that goes on from it."""
    as_torchrun()
    folder = Path(folder)
    found = []
    for epochs, checkpoint in ((1, None), (2, folder / "run.ckpt")):
        plugin, module = ours() if policy is None else MixedPrecision(policy), module_of(kind)
        trainer = trainer_of(
            plugin, max_epochs=epochs, gradient_clip_val=0.125, devices=RANKS, strategy=strategy_of(module_of)
        )
        # Shards are pickled, which Lightning reads without asking before 2.6.
        asked: dict[str, Any] = (
            {"weights_only": False} if checkpoint and "weights_only" in signature(trainer.fit).parameters else {}
        )
        trainer.fit(module, batches(), ckpt_path=checkpoint, **asked)
        if checkpoint is None:
            trainer.save_checkpoint(folder / "run.ckpt")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((numbers(module), metrics, module.rates, plugin.state_dict()))
    return found


def batches() -> DataLoader[Any]:
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


RUNS = {
    f"{kind}-{policy}-{name}": (module_of, kind, policy)
    for name, module_of in (("DDP", Whole), ("FSDP2", Sharded))
    for kind, policy in (("foreach", None), ("fused", "auto"))
}


def each(function: Callable[..., Any], runs: Mapping[str, tuple[Any, ...]], folder: Path) -> dict[str, Any]:
    """Returns what a rank knows after each of several runs: importing Lightning takes longer than they do."""
    found = {}
    for name, arguments in runs.items():
        (own := folder / name).mkdir(exist_ok=True)
        found[name] = function(*arguments, own)
    return found


@pytest.fixture(scope="module")
def of_trainer(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks(RANKS, each, trained, RUNS, folder, folder=folder / "ranks")


@pytest.mark.parametrize("name", RUNS)
def test_ranks_clip_skip_and_resume_together(name: str, of_trainer: list[dict[str, Any]]) -> None:
    first, second = (found[name] for found in of_trainer)
    assert first == second
    (_, metrics, rates, _), (_, resumed, _, _) = first
    assert metrics["gradscale/skipped"] >= 1
    assert metrics["gradscale/applied"] + metrics["gradscale/skipped"] == 4
    assert resumed["gradscale/grad_norm"] > 0.125, "the bound: it was clipped"
    assert rates[1] == rates[0], "held after the skip"


def fabric_trained(strategy: str, how: dict[str, Any], folder: Path) -> Any:
    """Returns what a rank knows after a few steps, one of them skipped, saved and loaded into another run."""
    as_torchrun()
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    found = []
    for resumed in (False, True):
        chosen: Any = (
            DDPStrategy()
            if strategy == "DDP"
            else ModelParallelStrategy(sharded, data_parallel_size=RANKS, tensor_parallel_size=1)
        )
        plugin = FabricMixedPrecision(clip_norm=0.125)
        fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=chosen, plugins=[plugin])
        fabric.launch()
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        model = fabric.setup_module(own)
        optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(own.parameters(), lr=2.0**-6, **how))
        state = {"model": model, "optimizer": optimizer}
        if resumed:
            fabric.load(Path(folder) / "run.ckpt", state)
            found.append(plugin.state_dict())
        for index in range(3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * index + dist.get_rank()))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            if index == 1 and dist.get_rank() == 1:
                loss = loss * torch.inf
            fabric.backward(loss)
            optimizer.step()
        found.append((numbers(own), plugin.state_dict(), plugin.metrics()))
        if not resumed:
            fabric.save(Path(folder) / "run.ckpt", state)
    return found


FABRIC_RUNS = {
    f"{strategy}-{how}": (strategy, {how: True}) for strategy in ("DDP", "FSDP2") for how in ("foreach", "fused")
}


@pytest.fixture(scope="module")
def of_fabric(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fabric")
    return run_ranks(RANKS, each, fabric_trained, FABRIC_RUNS, folder, folder=folder / "ranks")


@pytest.mark.parametrize("name", FABRIC_RUNS)
def test_ranks_of_a_fabric_clip_skip_and_resume_together(name: str, of_fabric: list[dict[str, Any]]) -> None:
    first, second = (found[name] for found in of_fabric)
    assert first == second
    (_, saved, metrics), loaded, _ = first
    assert loaded == saved
    assert metrics["gradscale/skipped"] >= 1
    assert metrics["gradscale/grad_norm"] > 0.125
