"""`GradScaler.step(optimizer, clip_norm=..., clip_value=...)`: one read of the gradients, and one factor for both."""

from typing import Any

import pytest
import torch
from benchmarks.traffic import Traffic
from tests.torch.drop_in.helpers import OURS, HostReads, batches, give, grad_of, last_of, linear_pair, parameter, ready
from tests.torch.helpers import INF, poison
from torch import Tensor, nn

from gradscale import Dynamic, Headroom
from gradscale.torch import GradScaler, LossScaler, MasterWeights

HOWS = [{"foreach": True}, {"fused": True}]
KINDS = [torch.optim.AdamW, torch.optim.SGD]
BOUND = 2.0**-4
"""Below the norm of every step of `train`."""


def optimizer_of(model: nn.Module, kind: Any, how: dict[str, Any]) -> Any:
    return kind(model.parameters(), lr=2.0**-6, **how)


def train(step: Any, kind: Any, how: dict[str, Any], bad: int | None = 2) -> list[Tensor]:
    """Returns the weights after steps on the gradients of scaled losses, one of which is poisoned."""
    model = linear_pair()
    optimizer = optimizer_of(model, kind, how)
    for index, (x, y) in enumerate(batches(5)):
        optimizer.zero_grad()
        step(model, optimizer, nn.functional.mse_loss(model(x), y), index == bad)
    return list(model.parameters())


class DropIn:
    """The loop of the drop-in, which clips in `step`."""

    def __init__(self, scaler: GradScaler, *, unscale: bool = False, **clip: Any) -> None:
        self.scaler, self.unscale, self.clip = scaler, unscale, clip
        self.norms: list[float] = []

    def __call__(self, model: nn.Module, optimizer: Any, loss: Tensor, bad: bool) -> None:
        self.scaler.scale(loss).backward()
        if bad:
            poison(next(model.parameters()))
        if self.unscale:
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer, **self.clip)
        self.scaler.update()
        norm = last_of(self.scaler).grad_norm
        self.norms.append(-1.0 if norm is None else float(norm))


class Whole:
    """The loop of `LossScaler`, which clips in `step`, too."""

    def __init__(self, **clip: Any) -> None:
        self.scaler, self.clip = LossScaler(policy=Dynamic(init_scale=2.0**10, growth_interval=2)), clip
        self.norms: list[float] = []

    def __call__(self, model: nn.Module, optimizer: Any, loss: Tensor, bad: bool) -> None:
        self.scaler.backward(loss)
        if bad:
            poison(next(model.parameters()))
        result = self.scaler.step(optimizer, **self.clip)
        self.norms.append(-1.0 if result.grad_norm is None else float(result.grad_norm))


def scaler_of(**kwargs: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **kwargs)


@pytest.mark.parametrize("clip", [{"clip_norm": BOUND}, {"clip_value": 2.0**-8}, {"clip_norm": 1.0, "clip_value": 0.1}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_clipped_steps_and_norms_are_those_of_loss_scaler(how: Any, kind: Any, clip: dict[str, Any]) -> None:
    ours, whole = DropIn(scaler_of(), **clip), Whole(**clip)
    for mine, theirs in zip(train(ours, kind, how), train(whole, kind, how), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
    assert ours.norms == pytest.approx(whole.norms, rel=1e-6)
    assert ours.scaler.get_scale() == whole.scaler.metrics()["scale"]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_clip_norm_is_that_of_torchs_function_on_unscaled_gradients(how: Any, unscale: bool) -> None:
    def torchs(model: nn.Module, optimizer: Any, loss: Tensor, bad: bool) -> None:
        loss.backward()
        if not bad:
            nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            optimizer.step()

    expected = train(torchs, torch.optim.SGD, {})
    for mine, theirs in zip(
        train(DropIn(scaler_of(), unscale=unscale, clip_norm=BOUND), torch.optim.SGD, how), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_grad_norm_is_the_unscaled_norm_and_gradients_are_clipped(how: Any, unscale: bool) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0, **how)
    give((owner, torch.tensor([24.0, 32.0])))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, clip_norm=2.5)
    scaler.update()
    assert last_of(scaler).grad_norm == 5.0
    torch.testing.assert_close(grad_of(owner), torch.tensor([1.5, 2.0]), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(owner.detach(), torch.tensor([-0.5, -1.0]), rtol=1e-6, atol=1e-6)
    assert scaler.metrics()["grad_norm"] == 5.0


@pytest.mark.parametrize("how", HOWS)
def test_norm_below_the_bound_changes_nothing(how: Any) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0, **how)
    give((owner, torch.tensor([24.0, 32.0])))
    scaler.step(optimizer, clip_norm=100.0)
    assert owner.tolist() == [-2.0, -3.0]
    assert grad_of(owner).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad", [INF, torch.nan])
@pytest.mark.parametrize("clip", [{"clip_norm": 1.0}, {"clip_value": 1.0}])
@pytest.mark.parametrize("how", HOWS)
def test_overflow_skips_the_step_and_leaves_nothing_behind(how: Any, clip: Any, bad: float, unscale: bool) -> None:
    owner, other = parameter(1.0, (2,)), parameter(1.0, (2,))
    optimizer = torch.optim.AdamW([("owner", owner), ("other", other)], lr=1.0, **how)
    scaler = ready(OURS("cpu", init_scale=8.0))
    give((owner, torch.tensor([bad, 8.0])), (other, 8.0))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, **clip)
    scaler.update()
    assert last_of(scaler).skipped()
    assert [(each.name, each.count) for each in last_of(scaler).culprits()] == [("owner", 1)]
    assert owner.tolist() == other.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 4.0
    assert not hasattr(optimizer, "grad_scale")
    optimizer.zero_grad()
    give((owner, 4.0), (other, 4.0))
    scaler.step(optimizer, **clip)
    assert not last_of(scaler).skipped()


def test_norm_whose_square_is_not_finite_skips_the_step() -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=1.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, 1e30))
    scaler.step(optimizer, clip_norm=1.0)
    assert last_of(scaler).skipped()
    assert owner.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_any_type_are_clipped(dtype: torch.dtype, how: Any) -> None:
    owners = [parameter(1.0, (2,)), parameter(1.0, (2,), dtype=dtype)]
    kind = torch.optim.Adagrad  # fused SGD leaves 16-bit parameters as they are on a CPU
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), kind(owners, **how)
    give((owners[0], torch.tensor([24.0, 0.0])), (owners[1], torch.tensor([0.0, 32.0], dtype=dtype)))
    scaler.step(optimizer, clip_norm=2.5)
    assert last_of(scaler).grad_norm == 5.0
    for owner, expected in zip(owners, ([1.5, 0.0], [0.0, 2.0]), strict=True):
        torch.testing.assert_close(grad_of(owner).float(), torch.tensor(expected), rtol=1e-2, atol=0.0)


def test_fp16_gradients_are_refused_before_they_are_changed() -> None:
    owner = parameter(1.0, (2,), dtype=torch.float16)
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, 8.0))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer, clip_norm=1.0)
    assert grad_of(owner).tolist() == [8.0, 8.0]


def test_masters_of_fp16_parameters_are_clipped_in_float32() -> None:
    owner = parameter(1.0, (2,), dtype=torch.float16)
    optimizer = MasterWeights(torch.optim.SGD([owner], lr=1.0), grad_fp32=False)
    scaler = ready(OURS("cpu", init_scale=8.0))
    give((owner, torch.tensor([24.0, 32.0], dtype=torch.float16)))
    scaler.step(optimizer, clip_norm=2.5)
    assert last_of(scaler).grad_norm == 5.0
    torch.testing.assert_close(owner.detach().float(), torch.tensor([-0.5, -1.0]), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("how", HOWS)
def test_gradient_that_two_parameters_hold_is_counted_and_clipped_once(how: Any) -> None:
    first, second = parameter(1.0, (1,)), parameter(1.0, (1,))
    shared = torch.tensor([40.0])
    give((first, shared), (second, shared))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([first, second], lr=1.0, **how)
    scaler.step(optimizer, clip_norm=2.5)
    assert last_of(scaler).grad_norm == 5.0
    torch.testing.assert_close(first.detach(), torch.tensor([-1.5]), rtol=1e-5, atol=0.0)
    assert first.item() == second.item()


@pytest.mark.not_simulated("sparse tensors")
def test_sparse_gradients_are_summed_before_their_norm() -> None:
    table = nn.Parameter(torch.zeros(3, 1))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([table], lr=1.0)
    indices, values = torch.tensor([[1, 1]]), torch.tensor([[24.0], [16.0]])
    table.grad = torch.sparse_coo_tensor(indices, values, (3, 1), check_invariants=True)
    scaler.step(optimizer, clip_norm=2.5)
    assert last_of(scaler).grad_norm == 5.0
    torch.testing.assert_close(table.detach().flatten(), torch.tensor([0.0, -2.5, 0.0]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("how", HOWS)
def test_policy_that_follows_the_largest_gradient_sees_it_before_the_clip(how: Any) -> None:
    def trained(**clip: float) -> tuple[Any, float]:
        owner = parameter(1.0, (2,))
        scaler, optimizer = ready(OURS("cpu", policy=Headroom())), torch.optim.SGD([owner], lr=0.0, **how)
        for _ in range(3):
            give((owner, torch.tensor([0.5, 0.25]) * scaler.get_scale()))
            scaler.step(optimizer, **clip)
            scaler.update()
        return scaler._rule.state, float(last_of(scaler).amax)  # type: ignore[arg-type]

    assert trained(clip_norm=2.0**-6) == trained()


def follow(scaler: GradScaler, factors: list[float], **clip: float) -> list[float]:
    """Returns the scales after steps whose gradients are 3 and 4 times a factor."""
    owner = parameter(1.0, (2,))
    optimizer, scales = torch.optim.SGD([owner], lr=0.0, fused=True), []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((owner * torch.tensor([3.0, 4.0]) * factor).sum()).backward()
        scaler.step(optimizer, **clip)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


FALLING = [2.0 ** -min(step, 20) for step in range(40)]
"""The ratio of the largest to the norm is 4 / 5 in all of these steps."""


def test_largest_gradient_that_a_norm_gives_moves_the_scale_as_the_measured_one_does() -> None:
    measured, estimated = (ready(OURS("cpu", policy=Headroom(leak=0.1))) for _ in range(2))
    scales = follow(measured, FALLING)
    assert follow(estimated, FALLING, clip_norm=1.0) == scales
    assert len(set(scales)) > 5


@pytest.mark.parametrize("step", [5, 16, 17, 31, 32])
def test_gradients_are_read_once_for_a_clip_but_at_the_first_16_steps_and_every_16th(step: int) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", policy=Headroom())), torch.optim.SGD([owner], lr=0.0, fused=True)
    for _ in range(step):
        give((owner, scaler.get_scale()))
        scaler.step(optimizer, clip_norm=1.0)
        scaler.update()
    give((owner, scaler.get_scale()))
    with Traffic([grad_of(owner)]) as traffic:
        scaler.step(optimizer, clip_norm=1.0)
    reads_both = step < 16 or step % 16 == 0
    assert traffic.passes_read == 2 + reads_both  # the norm, and the optimizer's own


@pytest.mark.parametrize("saved_after", [10, 16, 23])
def test_run_that_estimates_the_largest_gradient_is_resumed_bit_exactly(saved_after: int) -> None:
    whole = ready(OURS("cpu", policy=Headroom(leak=0.1)))
    follow(whole, FALLING[:saved_after], clip_norm=1.0)
    resumed = ready(OURS("cpu", policy="auto"))
    resumed.load_state_dict(whole.state_dict())
    rest = [2.0 ** -((step * 7) % 19) for step in range(30)]
    assert follow(resumed, rest, clip_norm=1.0) == follow(whole, rest, clip_norm=1.0)
    assert resumed.state_dict() == whole.state_dict()


def test_largest_gradient_of_a_step_is_that_of_all_its_optimizers_clipped_or_not() -> None:
    clipped, plain = parameter(1.0, (2,)), parameter(1.0, (2,))
    optimizers = [torch.optim.SGD([each], lr=0.0) for each in (clipped, plain)]
    scaler = ready(OURS("cpu", policy=Headroom()))
    for factor in [1.0] * 20 + [2.0**6]:
        scale = scaler.get_scale()
        give((clipped, scale), (plain, factor * scale))
        scaler.step(optimizers[0], clip_norm=1.0)
        scaler.step(optimizers[1])
        scaler.update()
    alone = ready(OURS("cpu", policy=Headroom()))
    assert scaler.get_scale() == follow(alone, [0.25] * 20 + [2.0**4])[-1]


@pytest.mark.parametrize("each", [True, False], ids=["an update each", "one update"])
def test_optimizers_of_one_backward_pass_measure_and_estimate_at_the_same_steps(each: bool) -> None:
    pair = [parameter(1.0, (2,)), parameter(1.0, (2,))]
    optimizers = [torch.optim.SGD([owner], lr=0.0) for owner in pair]
    scaler = ready(OURS("cpu", policy=Headroom()))
    reads = []
    for _ in range(40):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(owner.sum() for owner in pair)).backward()  # type: ignore[arg-type]
        with Traffic([grad_of(owner) for owner in pair]) as traffic:
            for optimizer in optimizers:
                scaler.step(optimizer, clip_norm=1.0)
                if each:
                    scaler.update()
            if not each:
                scaler.update()
        sizes = (traffic.by_operator[name].read for name in ("_foreach_norm", "aminmax"))
        reads.append(sum(sizes) / traffic.gradient_bytes)
    assert reads == [2.0 if step < 16 or step % 16 == 0 else 1.0 for step in range(40)]


@pytest.mark.parametrize("how", HOWS)
def test_unscale_clips_by_the_norm_it_returns(how: Any) -> None:
    owner = parameter(0.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0, **how)
    give((owner, torch.tensor([24.0, 32.0])))
    assert scaler.unscale_and_clip_(optimizer, 2.5) == 5.0
    assert grad_of(owner).tolist() == pytest.approx([1.5, 2.0], rel=1e-6)
    scaler.step(optimizer)
    scaler.update()
    assert owner.tolist() == pytest.approx([-1.5, -2.0], rel=1e-6)
    assert last_of(scaler).grad_norm == 5.0


def test_unscale_without_a_bound_returns_the_norm_and_clips_nothing() -> None:
    owner = parameter(0.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, torch.tensor([24.0, 32.0])))
    assert scaler.unscale_and_clip_(optimizer, None) == 5.0
    assert grad_of(owner).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("how", HOWS)
def test_unscale_with_a_clip_skips_an_overflow_and_names_it(how: Any) -> None:
    model = linear_pair()
    scaler, optimizer = OURS("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=1.0, **how)
    before = [each.detach().clone() for each in model.parameters()]
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    grad_of(model[1].weight)[0, 0] = INF
    assert scaler.unscale_and_clip_(optimizer, 1.0) == INF
    scaler.step(optimizer)
    scaler.update()
    assert last_of(scaler).skipped()
    assert [culprit.kind for culprit in last_of(scaler).culprits()] == ["inf"]
    assert scaler.get_scale() == 4.0
    assert all(map(torch.equal, before, model.parameters()))


def test_unscale_with_a_clip_follows_the_largest_gradient_before_it() -> None:
    def scale_after(unscale: Any) -> float:
        owner = parameter(1.0, (2,))
        scaler, optimizer = ready(OURS("cpu", policy=Headroom())), torch.optim.SGD([owner], lr=0.0)
        give((owner, 2.0**10 * scaler.get_scale()))
        unscale(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    clipped = scale_after(lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 2.0**-6))
    assert clipped == scale_after(lambda scaler, optimizer: scaler.unscale_(optimizer))


def test_unscale_of_a_disabled_scaler_clips() -> None:
    owner = parameter(0.0, (2,))
    scaler, optimizer = OURS("cpu", enabled=False), torch.optim.SGD([owner], lr=1.0)
    give((owner, torch.tensor([3.0, 4.0])))
    assert scaler.unscale_and_clip_(optimizer, 2.5) == 5.0
    assert grad_of(owner).tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


def test_unscale_refuses_a_bound_that_is_not_positive_and_divides_nothing() -> None:
    owner = parameter(0.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, 8.0))
    with pytest.raises(ValueError, match="`clip_norm` must be greater than 0"):
        scaler.unscale_and_clip_(optimizer, 0.0)
    assert grad_of(owner).tolist() == [8.0, 8.0]


def test_step_that_a_norm_skips_after_unscale_is_counted_and_lowers_the_scale_as_one_without_unscale() -> None:
    for unscale in (False, True):
        owner = parameter()
        scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
        give((owner, 1e30))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, clip_norm=1.0)
        scaler.update()
        assert last_of(scaler).skipped()
        assert (scaler.metrics()["skipped"], scaler.get_scale()) == (1.0, 4.0)


def test_each_optimizer_of_a_backward_pass_is_clipped_by_its_own_norm() -> None:
    first, second = parameter(1.0, (1,)), parameter(1.0, (1,))
    scaler = ready(OURS("cpu", init_scale=8.0))
    optimizers = [torch.optim.SGD([each], lr=1.0, fused=fused) for each, fused in ((first, False), (second, True))]
    give((first, 40.0), (second, 8.0))
    norms = []
    for optimizer in optimizers:
        scaler.step(optimizer, clip_norm=2.0)
        scaler.update()
        norms.append(float(last_of(scaler).grad_norm))  # type: ignore[arg-type]
    assert norms == [5.0, 1.0]
    assert first.item() == pytest.approx(-1.0, rel=1e-5)
    assert second.item() == 0.0


class Raising(torch.optim.SGD):
    """Raises the first time."""

    raised = False

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.raised:
            self.raised = True
            raise OSError("no memory")
        return super().step(closure)


@pytest.mark.parametrize("how", HOWS)
def test_step_that_is_repeated_after_an_error_clips_once(how: Any) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), Raising([owner], lr=1.0, **how)
    give((owner, torch.tensor([24.0, 32.0])))
    with pytest.raises(OSError, match="no memory"):
        scaler.step(optimizer, clip_norm=2.5)
    scaler.step(optimizer, clip_norm=2.5)
    torch.testing.assert_close(owner.detach(), torch.tensor([-0.5, -1.0]), rtol=1e-5, atol=1e-6)
    assert last_of(scaler).grad_norm == 5.0


def test_step_that_is_interrupted_before_it_clips_is_not_repeated_on_scaled_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, torch.tensor([24.0, 32.0])))
    with monkeypatch.context() as patched:
        patched.setattr("gradscale.torch.step.apply.multiply", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer, clip_norm=100.0)
    scaler.step(optimizer, clip_norm=100.0)
    assert owner.tolist() == [-2.0, -3.0]


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("policy", [None, Headroom()])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_clipped_step_reads_nothing_on_the_cpu(how: Any, policy: Any) -> None:
    model = linear_pair()
    # SGD reads nothing by itself.
    scaler, optimizer = GradScaler("cpu", policy=policy), torch.optim.SGD(model.parameters(), **how)
    counted = []
    for x, y in batches(2):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        with HostReads() as counter:
            scaler.step(optimizer, clip_norm=1.0)
            scaler.update()
        counted.append(counter.count)
    assert counted[-1] == 0


@pytest.mark.parametrize("how", HOWS)
def test_scaler_that_is_disabled_still_clips(how: Any) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = OURS("cpu", enabled=False), torch.optim.SGD([owner], lr=1.0, **how)
    give((owner, torch.tensor([3.0, 4.0])))
    scaler.step(optimizer, clip_norm=2.5)
    torch.testing.assert_close(owner.detach(), torch.tensor([-0.5, -1.0]), rtol=1e-5, atol=1e-6)
    give((owner, torch.tensor([3.0, -4.0])))
    scaler.step(optimizer, clip_value=2.0)
    torch.testing.assert_close(owner.detach(), torch.tensor([-2.5, 1.0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [0.0, -1.0, "1"])
@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
def test_bound_must_be_a_positive_number(name: str, bound: Any) -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), torch.optim.SGD([owner], lr=1.0)
    give((owner, 8.0))
    with pytest.raises((TypeError, ValueError), match=rf"`{name}` must be"):
        scaler.step(optimizer, **{name: bound})
    assert grad_of(owner).tolist() == [8.0, 8.0]


class TakesScaler(torch.optim.SGD):
    """An optimizer of torch's older contract: its `step` is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(closure)


def test_optimizer_that_unscales_its_gradients_itself_cannot_be_clipped() -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), TakesScaler([owner], lr=1.0)
    give((owner, 8.0))
    with pytest.raises(TypeError, match=r"Received: TakesScaler, whose `step` takes a `grad_scaler`"):
        scaler.step(optimizer, clip_norm=1.0)


class OwnClip(torch.optim.SGD):
    """An optimizer whose `step` has an argument of this name."""

    def step(self, closure: Any = None, *, clip_norm: float = 0.0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return clip_norm


def test_argument_of_the_optimizers_own_step_is_passed_on() -> None:
    owner = parameter(1.0, (2,))
    scaler, optimizer = ready(OURS("cpu", init_scale=8.0)), OwnClip([owner], lr=1.0)
    give((owner, 80.0))
    assert scaler.step(optimizer, clip_norm=1.0) == 1.0
    assert grad_of(owner).tolist() == [10.0, 10.0]
