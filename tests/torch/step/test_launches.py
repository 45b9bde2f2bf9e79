"""Kernels that a step launches on an accelerator, beside those of the optimizer: no more than torch's scaler does."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.process_group import end_process_group
from tests.torch.sim import host
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.simulated_only

NO_LAUNCH = (
    "alias",
    "as_strided",
    "detach",
    "empty",
    "expand",
    "lift",
    "select",
    "slice",
    "unbind",
    "unsqueeze",
    "view",
)
"""How the names of operators begin that only make tensors, or views of them."""

STEPS = 34
"""The first steps find the scale and read both sizes, and every 16th reads the largest magnitude for the metrics."""

MOST = {  # only lower these
    # (optimizer, clip): torch's scaler, ours at most steps, and at any but the first 16. Fused, the rule is a kernel.
    ("fused", False): (10, 6, 6),
    ("fused", True): (19, 6, 7),
    ("foreach", False): (10, 8, 8),
    ("foreach", True): (18, 10, 12),
}

MOST_OF_TORCHS_CALLS = 19, 17, 17
"""The same for `unscale_` and `clip_grad_norm_` with a fused optimizer; the second launches 9."""


class Launches(TorchDispatchMode):
    """Counts the operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        arrives = name == "copy_" and args[0].device.type == "cpu"  # how the simulation ends a copy to the host
        if not (arrives or name.startswith(NO_LAUNCH)):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def launches(
    layers: int, optimizer: dict[str, bool], clip: bool, scaler: Any, *, torchs_calls: bool = False
) -> list[int]:
    """Returns how many operators each step has, with those of the optimizer; a scaler of None steps it alone.

    The gradients are clipped by the scaler, or by `torchs_calls`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(8, 8), nn.ReLU())])
    adamw = torch.optim.AdamW(model.parameters(), **optimizer)  # type: ignore[arg-type]
    scaler = scaler and scaler(model)
    x, found = torch.randn(4, 8), []
    for _ in range(STEPS):
        loss, counted = model(x).square().mean(), Launches()
        with counted:
            scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()
        with counted:
            if scaler is None:
                adamw.step()
            elif torchs_calls:
                scaler.unscale_(adamw)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(adamw)
            else:
                scaler.step(adamw, **({"clip_norm": 1.0} if clip else {}))
            if isinstance(scaler, GradScaler):
                scaler.update()
        adamw.zero_grad()
        found.append(sum(counted.found.values()))
    return found


SCALERS = {
    "LossScaler, dynamic": lambda model: LossScaler(model, "dynamic"),
    "LossScaler, auto": LossScaler,
    "GradScaler": lambda model: GradScaler(torch.get_default_device().type),
    "GradScaler, auto": lambda model: GradScaler(torch.get_default_device().type, policy="auto"),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_a_step_launches_no_more_than_the_table_says_whatever_the_number_of_tensors(
    optimizer: str, clip: bool, scaler: str
) -> None:
    torchs, mostly, ever = MOST[optimizer, clip]
    for layers in (10, 100):
        alone = launches(layers, {optimizer: True}, False, None)
        whole = launches(layers, {optimizer: True}, clip, SCALERS[scaler])
        extra = [step - bare for step, bare in zip(whole, alone, strict=True)][16:]
        assert sorted(extra)[len(extra) // 2] <= mostly <= torchs
        assert max(extra) <= ever <= torchs


@pytest.mark.parametrize("scaler", [name for name in SCALERS if name.startswith("GradScaler")])
def test_torchs_own_calls_launch_no_more_than_with_torchs_scaler(scaler: str) -> None:
    torchs, mostly, ever = MOST_OF_TORCHS_CALLS
    alone = launches(10, {"fused": True}, False, None)
    whole = launches(10, {"fused": True}, True, SCALERS[scaler], torchs_calls=True)
    extra = [step - bare for step, bare in zip(whole, alone, strict=True)][16:]
    assert sorted(extra)[len(extra) // 2] <= mostly <= torchs
    assert max(extra) <= ever <= torchs


MOST_OF_RANKS = 9, 10
"""Of a step of FSDP2 beside its all-reduces, at most steps and at any: two kernels and a copy to the host more."""


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Yields a mesh of two ranks that always have the same numbers, of which this process is one."""
    store: Any = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", rank=0, world_size=2, store=store)

    class Done:
        def wait(self) -> None:
            pass

    def all_reduce(tensor: Tensor, op: Any, **_: Any) -> Done:
        if op == dist.ReduceOp.SUM:
            tensor.copy_(tensor + tensor)
        return Done()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield DeviceMesh("sim", torch.arange(2, device="cpu"))
    end_process_group()


def steps_of_shards(mesh: DeviceMesh, scaler: Any, clip: bool) -> list[int]:
    """Returns how many operators the steps on sharded parameters have, with those of the optimizer."""
    from torch.distributed.tensor import DTensor, Shard

    def sharded(value: float) -> Tensor:
        return DTensor.from_local(torch.full((4, 8), value), mesh, [Shard(0)], run_check=False)

    weights = [nn.Parameter(sharded(1.0)) for _ in range(20)]
    adamw, found = torch.optim.AdamW(weights, fused=True), []
    for _ in range(STEPS):
        loss, counted = torch.ones((), requires_grad=True) * 1.0, Launches()
        with counted:
            scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()
        for weight in weights:
            weight.grad = sharded(0.25)
        with host.waits(forbid=True), counted:
            if scaler is None:
                adamw.step()
            else:
                scaler.step(adamw, **({"clip_norm": 1.0} if clip else {}))
            if isinstance(scaler, GradScaler):
                scaler.update()
        del counted.found["copy_"], counted.found["add"]  # of the all-reduces
        found.append(sum(counted.found.values()))
    return found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_step_of_fsdp2_launches_three_operators_more_and_reads_nothing(
    scaler: str, clip: bool, two_ranks: DeviceMesh
) -> None:
    alone = steps_of_shards(two_ranks, None, False)
    whole = steps_of_shards(two_ranks, SCALERS[scaler](None), clip)
    extra = [step - bare for step, bare in zip(whole, alone, strict=True)][16:]
    mostly, ever = MOST_OF_RANKS
    assert sorted(extra)[len(extra) // 2] <= mostly
    assert max(extra) <= ever
