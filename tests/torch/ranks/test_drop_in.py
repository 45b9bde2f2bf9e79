"""The drop-in on several ranks: one decision over all meshes, over plain tensors and DTensors, and for every policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.drop_in.helpers import OURS, TORCH, grad_of
from tests.torch.helpers import INF, NAN
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.sharded import backward_of, loss_of, model_of
from tests.torch.ranks.test_rounds import counting
from tests.torch.versions import needs_sharding_on_cpu
from torch import Tensor, nn

from gradscale import Dynamic, Policy, Status
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch import ScaleDesync
from gradscale.torch.gradients import local

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

POLICIES: dict[str, Policy] = {"headroom": Headroom(), "log max": LogMax(), "histogram": Histogram()}


def distributed(whole: Tensor, mesh: Any = None) -> Tensor:
    """Returns a tensor in shards along its first dimension; a plain one without a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])


class Parts:
    """Parameters on meshes of their own or plain, with gradients that are set by hand."""

    def __init__(self, scaler: Any, *meshes: Any, **how: Any) -> None:
        self.scaler, self.meshes = scaler, meshes
        self.parameters = [nn.Parameter(distributed(torch.ones(8), mesh)) for mesh in meshes]
        # A group for each: torch's fused kernels take no tensors of different meshes.
        self.optimizer = torch.optim.AdamW([{"params": [each]} for each in self.parameters], lr=0.5, **how)
        scaler.scale(torch.ones(()))

    def step(self, bad: int | None = None, bad_rank: int = 0, size: float = 1.0) -> tuple[bool, float]:
        """Returns whether the step was applied on this rank, and the next scale."""
        before = self.weights()
        scale = self.scaler.get_scale()
        for index, (parameter, mesh) in enumerate(zip(self.parameters, self.meshes, strict=True)):
            parameter.grad = distributed(torch.arange(8.0) * (size * scale / (1 + index)), mesh)
        if bad is not None and dist.get_rank() == bad_rank:
            local(grad_of(self.parameters[bad]))[-1] = INF
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.weights() != before, self.scaler.get_scale()

    def weights(self) -> list[list[float]]:
        return [local(parameter.detach()).tolist() for parameter in self.parameters]


def on_two_meshes(kind: Any, how: dict[str, Any]) -> Any:
    """Faults in gradients on either mesh and in plain ones, each on another rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    meshes = (mesh["data"], mesh["tensor"]) if kind is TORCH else (mesh["data"], mesh["tensor"], None)
    parts = Parts(kind("cpu", init_scale=2.0**10, growth_interval=2), *meshes, **how)
    return [parts.step(), *(parts.step(bad, bad_rank=3 - bad) for bad in range(len(meshes))), parts.step()]


def on_four_ranks() -> Any:
    return {
        "ours": on_two_meshes(OURS, {"foreach": True}),
        "ours, fused": on_two_meshes(OURS, {"fused": True}),
        "torch": on_two_meshes(TORCH, {"foreach": True}),
        "torch, fused": on_two_meshes(TORCH, {"fused": True}),
    }


def with_policy(name: str, rank: int) -> Any:
    """Scales on two ranks; the largest gradient is on the second."""
    from torch.distributed.device_mesh import init_device_mesh

    scaler = OURS("cpu", policy=POLICIES[name])
    parts = Parts(scaler, init_device_mesh("cpu", (2,)), None)
    steps = [parts.step(0 if number == 2 else None, 1, size=2.0**number) for number in range(6)]
    return steps, scaler.state_dict(), scaler.last.amax.item()  # type: ignore[union-attr]


def with_kind(kind: str) -> Any:
    """Weights and scales after some steps of a small model, one of them with a fault on the first rank."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    scaler = OURS("cpu", init_scale=2.0**10, growth_interval=2)
    found: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        with backward_of(kind):
            scaler.scale(loss_of(model, kind)).backward()
        if step == 1 and dist.get_rank() == 0:
            local(grad_of(next(iter(model.parameters())))).view(-1)[0] = INF
        if step == 2:
            scaler.unscale_(optimizer)
        with counting() as begun:
            scaler.step(optimizer)
        scaler.update()
        found.append((scaler.last.skipped(), scaler.get_scale(), begun))  # type: ignore[union-attr]
    return found


class Stage:
    """A stage of a pipeline: plain parameters of its own. The first has no loss, and gets its gradients by hand."""

    def __init__(self, group: Any, *, fused: bool) -> None:
        self.parameter = nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0, fused=fused)
        self.scaler = OURS("cpu", init_scale=8.0, group=group)

    def step(self, bad: bool = False) -> tuple[float, float]:
        """Returns the weight and the scale after a step."""
        if dist.get_rank() == 0:
            self.parameter.grad = torch.full((4,), self.scaler.get_scale())
        else:
            self.optimizer.zero_grad()
            self.scaler.scale(self.parameter.sum()).backward()
        if bad:
            grad_of(self.parameter)[0] = INF
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.parameter[1].item(), self.scaler.get_scale()


def with_stages(rank: int) -> Any:
    found = {}
    for name, group in (("world", dist.group.WORLD), ("alone", "alone")):
        for fused in (False, True):
            if name == "alone" and rank == 0:
                continue  # has no scale without a loss
            stage = Stage(group, fused=fused)
            found[name, fused] = [stage.step(), stage.step(bad=rank == 0), stage.step()]
    return found


def error_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def with_failures(rank: int) -> Any:
    """What is raised when only one rank has loaded a state."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    parts = Parts(OURS("cpu", init_scale=8.0), mesh)
    if rank == 0:
        parts.scaler.load_state_dict({**parts.scaler.state_dict(), "scale": 4.0})
    found["loaded"] = error_of(parts.step)
    return found


def with_ddp(rank: int) -> Any:
    """The collectives of two steps under DDP, whose gradients carry an inf of one rank to the other."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = OURS("cpu", init_scale=8.0)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * (INF if rank == step == 1 else 1.0)).backward()
        with counting() as begun:
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), begun))
    return found


def with_bad_loss(rank: int) -> Any:
    """Scale and status after a step whose loss is NaN on the second rank: of DTensors, in a named group, under DDP."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, given, plain in (("dtensors", None, False), ("group", dist.group.WORLD, True), ("ddp", None, True)):
        scaler = OURS("cpu", policy=Dynamic(init_scale=8.0), group=given)
        parameter = nn.Parameter(distributed(torch.ones(8), None if plain else mesh))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler.scale(torch.ones((), requires_grad=True) * (NAN if rank == 1 else 1.0)).backward()
        # As DDP reduces it, or on the one rank only.
        parameter.grad = distributed(torch.ones(8), None if plain else mesh)
        if rank == 1 or name == "ddp":
            local(grad_of(parameter)).fill_(NAN)
        scaler.step(optimizer)
        scaler.update()
        found[name] = scaler.get_scale(), scaler.last.status()  # type: ignore[union-attr]
    return found


KINDS = ("fsdp", "hsdp", "tp", "loss parallel")
MARKED = [pytest.param(kind, marks=needs_sharding_on_cpu if kind in ("fsdp", "hsdp") else ()) for kind in KINDS]


def on_two_ranks() -> Any:
    rank = dist.get_rank()
    found = {f"policy {name}": with_policy(name, rank) for name in POLICIES}
    found |= {f"kind {kind}": error_of(lambda kind=kind: with_kind(kind)) for kind in KINDS}
    found |= {"stages": with_stages(rank), "failures": with_failures(rank), "ddp": with_ddp(rank)}
    return found | {"bad loss": with_bad_loss(rank)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("drop_in") / "four"
    return run_ranks(4, on_four_ranks, folder=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("drop_in") / "two"
    return run_ranks(2, on_two_ranks, folder=folder)


@needs_sharding_on_cpu
@pytest.mark.parametrize("how", ["ours", "ours, fused"])
def test_ranks_decide_alike_over_all_meshes_and_plain_tensors(how: str, four: list[Any]) -> None:
    for found in (report[how] for report in four):
        assert [applied for applied, _ in found] == [True, False, False, False, True]
        assert [scale for _, scale in found] == [2.0**10, 2.0**9, 2.0**8, 2.0**7, 2.0**7]


@needs_sharding_on_cpu
@pytest.mark.parametrize("how", ["torch", "torch, fused"])
def test_ranks_with_torchs_scaler_part_where_there_are_several_meshes(how: str, four: list[Any]) -> None:
    assert any(report[how] != four[0][how] for report in four)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_see_the_sizes_of_all_ranks(name: str, two: list[Any]) -> None:
    assert two[0][f"policy {name}"] == two[1][f"policy {name}"]
    alone = OURS("cpu", policy=POLICIES[name])
    parts = WholeParts(alone)
    steps = [parts.step(bad=number == 2, size=2.0**number) for number in range(6)]
    found, _, amax = two[0][f"policy {name}"]
    assert found == steps
    if name != "histogram":
        assert amax == 7.0 * 2.0**5


class WholeParts:
    """The parameters of `with_policy` on one process: both plain."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.parameters = [nn.Parameter(torch.ones(8)) for _ in range(2)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.5)
        scaler.scale(torch.ones(()))

    def step(self, *, bad: bool, size: float) -> tuple[bool, float]:
        for index, parameter in enumerate(self.parameters):
            parameter.grad = torch.arange(8.0) * (size * self.scaler.get_scale() / (1 + index))
        if bad:
            grad_of(self.parameters[0])[-1] = INF
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return not bad, self.scaler.get_scale()


@pytest.mark.parametrize("kind", MARKED)
def test_dtensors_plain_parameters_and_dtensor_losses_take_one_round(kind: str, two: list[Any]) -> None:
    for found in (report[f"kind {kind}"] for report in two):
        assert [skipped for skipped, *_ in found] == [False, True, False, False]
        assert [scale for _, scale, _ in found] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
        # The third is unscaled before `step`, and has its round there.
        assert [begun for *_, begun in found] == [["all_reduce"], ["all_reduce"], [], ["all_reduce"]]


@pytest.mark.parametrize("fused", [False, True])
def test_stages_of_a_pipeline_decide_alike_in_a_named_group(fused: bool, two: list[Any]) -> None:
    for found in (report["stages"]["world", fused] for report in two):
        assert found == [(0.0, 8.0), (0.0, 4.0), (-1.0, 4.0)]
    assert two[1]["stages"]["alone", fused] == [(0.0, 8.0), (-1.0, 8.0), (-2.0, 8.0)]


def test_a_state_that_only_one_rank_has_loaded_is_found(two: list[Any]) -> None:
    for error in (report["failures"]["loaded"] for report in two):
        assert isinstance(error, ScaleDesync)
        assert error.scales == {0: 4.0, 1: 8.0}


def test_ddp_has_no_collective_of_the_scaler(two: list[Any]) -> None:
    assert two[0]["ddp"] == two[1]["ddp"] == [(8.0, []), (4.0, [])]


@pytest.mark.parametrize("kind", ["dtensors", "group"])
def test_loss_that_is_nan_on_one_rank_keeps_the_scale_on_all(kind: str, two: list[Any]) -> None:
    for report in two:
        assert report["bad loss"][kind] == (8.0, Status.NONFINITE_LOSS)


def test_loss_of_one_rank_counts_as_an_overflow_under_ddp_so_that_no_rank_parts(two: list[Any]) -> None:
    assert [report["bad loss"]["ddp"][0] for report in two] == [4.0, 4.0]


def clipped(how: dict[str, Any], unscale: bool, policy: Policy | None) -> Any:
    """Returns norms, and whether steps were skipped, of which the second has an inf on one rank; and what Adam saw."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    given: dict[str, Any] = {"init_scale": 8.0} if policy is None else {"policy": policy}
    scaler = OURS("cpu", **given)
    scaler.scale(torch.ones(()))
    sharded, plain = nn.Parameter(distributed(torch.ones(2), mesh)), nn.Parameter(torch.ones(1))
    # A group for each: torch's fused kernels take no DTensors beside plain ones. Its average is the last gradient.
    optimizer = torch.optim.Adam([{"params": [sharded]}, {"params": [plain]}], betas=(0.0, 0.0), **how)
    found = []
    for bad in (False, True):
        scale = scaler.get_scale()
        sharded.grad = distributed(torch.tensor([2.0, 4.0]) * scale, mesh)
        plain.grad = torch.full((1,), 4.0 * scale)
        if bad and dist.get_rank() == 1:
            local(grad_of(sharded))[0] = INF
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, clip_norm=3.0)
        scaler.update()
        assert scaler.last is not None
        found.append((scaler.last.skipped(), float(scaler.last.grad_norm)))  # type: ignore[arg-type]
    averages = [optimizer.state[each]["exp_avg"] for each in (sharded, plain)]
    return found, [*averages[0].full_tensor().tolist(), *averages[1].tolist()], scaler.get_scale()


@pytest.mark.parametrize("policy", [None, Headroom()], ids=["torch's rule", "headroom"])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("how", [{"foreach": False}, {"fused": True}], ids=["for loop", "fused"])
def test_ranks_clip_by_the_norm_over_all_shards(
    how: dict[str, Any], unscale: bool, policy: Policy | None, tmp_path: Path
) -> None:
    first, second = run_ranks(2, clipped, how, unscale, policy, folder=tmp_path)
    assert first == second
    found, averages, _ = first
    assert found == [(False, 6.0), (True, INF)]
    assert averages == pytest.approx([1.0, 2.0, 2.0], rel=1e-5)


def clipped_plain_shards() -> Any:
    """Returns the error of a clip where plain gradients differ by rank."""
    scaler = OURS("cpu", init_scale=8.0, group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    owner = nn.Parameter(torch.ones(2))
    owner.grad = torch.full((2,), 8.0 * (1 + dist.get_rank()))
    with pytest.raises(RuntimeError) as caught:
        scaler.step(torch.optim.SGD([owner], lr=1.0), clip_norm=1.0)
    return str(caught.value), owner.tolist()


def test_norm_of_plain_gradients_that_differ_by_rank_is_refused(tmp_path: Path) -> None:
    for text, weights in run_ranks(2, clipped_plain_shards, folder=tmp_path):
        assert "distinct" in text
        assert weights == [1.0, 1.0]
