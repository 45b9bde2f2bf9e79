"""What the gradients that DDP has reduced tell all ranks, and where they do not: no rank decides alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN, poison
from tests.torch.ranks.launch import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.functional import cross_entropy

from gradscale import Dynamic
from gradscale.torch import LossScaler
from gradscale.torch.ranks import reduced, store

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

DDP = nn.parallel.DistributedDataParallel
STEPS, BAD = 4, 2
"""The first step compares scales, so that it has a round; the bad one would have none if it were clean."""


class Loop:
    """A model in DDP, and the status of its steps on this rank. Rank 1 has a fault in one of them."""

    def __init__(self, **options: Any) -> None:
        store.PATIENCE_S = 2.0
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = LossScaler(self.model, Dynamic())

    def run(self, backward: Callable[[bool], None]) -> tuple[list[str], list[Tensor]]:
        """Returns the status, or the error, of every step, and the weights. `backward` is told if it is to be bad."""
        found: list[str] = []
        for step in range(STEPS):
            backward(step == BAD and dist.get_rank() == 1)
            try:
                found.append(str(self.scaler.step(self.optimizer).status()))
            except RuntimeError as error:
                found.append(type(error).__name__ + ", applied" * getattr(error, "applied", False))
            self.optimizer.zero_grad()
        return found, [each.detach().clone() for each in self.model.parameters()]

    def loss(self, targets: list[int] | None = None) -> Tensor:
        rows = torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + dist.get_rank())
        return cross_entropy(self.model(rows), torch.tensor(targets or [0, 2]))

    def backward_without_targets(self, bad: bool) -> None:
        """The loss of a batch without any target is NaN, and its gradients are zeros, whatever it is multiplied by."""
        self.scaler.backward(self.loss([-100, -100] if bad else None))

    def backward_with_retries(self, bad: bool) -> None:
        """A loss that is NaN, of finite gradients, in a micro-batch that may be retried, then one that is reduced."""
        with self.model.no_sync():
            loss = self.loss()
            self.scaler.backward(loss + loss.detach() * NAN if bad else loss, retries=1)
        self.scaler.backward(self.loss())

    def backward_to_inf(self, bad: bool) -> None:
        self.scaler.backward(self.loss())
        if bad:
            poison(self.model.module[0].weight, INF)

    def backward_from_inf(self, bad: bool) -> None:
        loss = self.loss()
        if bad:
            loss.register_hook(lambda grad: grad * INF)
        self.scaler.backward(loss)


def without_targets(options: dict[str, Any], unknown: bool = False) -> Any:
    if unknown:  # as on a device, where reading it would synchronize
        reduced.host_value = lambda value: None  # pyright: ignore[reportPrivateImportUsage]
    loop = Loop(**options)
    return loop.run(loop.backward_without_targets)


def assert_same(ranks: list[Any], statuses: list[str]) -> None:
    """Raises unless all ranks have these statuses, and the same weights."""
    for found, weights in ranks:
        assert found == statuses
        torch.testing.assert_close(weights, ranks[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def test_a_loss_without_targets_on_one_rank_skips_the_step_on_all(options: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_ranks(2, without_targets, options, folder=tmp_path)
    assert_same(ranks, ["applied", "applied", "nonfinite_loss", "applied"])


def test_it_does_so_where_the_host_does_not_know_the_loss(tmp_path: Path) -> None:
    ranks = run_ranks(2, without_targets, {}, True, folder=tmp_path)
    assert_same(ranks, ["applied", "applied", "nonfinite_loss", "applied"])


def two_models() -> list[str]:
    """Steps on one of two models whose loss is without targets on rank 1, and reaches both."""
    loop = Loop()
    judge = DDP(nn.Linear(3, 3))
    scaler, found = LossScaler([judge, loop.model], Dynamic()), []
    for step in range(STEPS):
        rows = judge(loop.model(torch.ones(2, 4)))
        missing = step == BAD and dist.get_rank() == 1
        scaler.backward(cross_entropy(rows, torch.tensor([-100, -100] if missing else [0, 2])))
        found.append(str(scaler.step(loop.optimizer).status()))
        loop.optimizer.zero_grad()
        judge.zero_grad()
    return found


def test_it_skips_the_step_of_any_model_that_it_reaches(tmp_path: Path) -> None:
    expected = ["applied", "applied", "nonfinite_loss", "applied"]
    assert run_ranks(2, two_models, folder=tmp_path) == [expected, expected]


def two_losses() -> list[str]:
    """Steps with two models, each with a loss of its own. In one, that of the first is NaN on rank 1.

    Its mark comes when the second, whose graph is newer, has its gradients.
    """
    loop, second = Loop(), DDP(nn.Linear(4, 3))
    scaler, found = LossScaler([loop.model, second], Dynamic()), []
    optimizer = torch.optim.SGD([*loop.model.parameters(), *second.parameters()], lr=0.1)
    for step in range(STEPS):
        bad = step == BAD and dist.get_rank() == 1
        first = scaler.scale(loop.loss() * (NAN if bad else 1.0))
        (first + scaler.scale(second(torch.ones(2, 4)).mean())).backward()
        found.append(str(scaler.step(optimizer).status()))
        optimizer.zero_grad()
    return found


def test_a_bad_loss_skips_one_step(tmp_path: Path) -> None:
    expected = ["applied", "applied", "nonfinite_loss", "applied"]
    assert run_ranks(2, two_losses, folder=tmp_path) == [expected, expected]


def retried() -> Any:
    loop = Loop()
    return loop.run(loop.backward_with_retries)


def test_a_loss_of_a_backward_pass_that_may_be_retried_skips_the_step_on_all(tmp_path: Path) -> None:
    assert_same(run_ranks(2, retried, folder=tmp_path), ["applied", "applied", "nonfinite_loss", "applied"])


def hooked() -> tuple[list[str], list[str], list[bool]]:
    """Returns the statuses with a hook that does not reduce over all ranks, then with one that does.

    And whether a clean step needs no round, for each.
    """
    found: list[list[str]] = []
    quiet: list[bool] = []
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for state, hook in (
        (PostLocalSGDState(None, own, start_localSGD_iter=0), post_localSGD_hook),
        (None, default_hooks.fp16_compress_hook),
    ):
        loop = Loop()
        loop.model.register_comm_hook(state, hook)  # type: ignore[arg-type]
        found.append(loop.run(loop.backward_from_inf)[0])
        quiet.append(loop.scaler._agreement._quiet([loop.optimizer], torch.device("cpu")))
    return found[0], found[1], quiet


def test_gradients_that_a_hook_of_ddp_does_not_reduce_on_all_ranks_tell_nothing(tmp_path: Path) -> None:
    for of_some, of_all, quiet in run_ranks(2, hooked, folder=tmp_path):
        assert of_some == of_all == ["applied", "applied", "overflow", "applied"]
        assert quiet == [False, True]


def goes_on() -> list[str]:
    loop = Loop()
    return loop.run(loop.backward_to_inf)[0]


def test_no_rank_goes_on_after_one_has_decided_alone(tmp_path: Path) -> None:
    other, alone = run_ranks(2, goes_on, folder=tmp_path)
    assert other == ["applied", "applied", "applied", "RankFailed, applied"]
    assert alone == ["applied", "applied", "RuntimeError", "RankFailed, applied"]
