"""`LossScaler.probe_after`: a run that skips steps in a row is probed by itself, and goes on as if it had not been."""

import copy
import math
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.torch.helpers import autocast, same, weights
from tests.torch.probing.models import Attention, Block, Stack, fp16_step, rows
from tests.torch.sim import host
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, Policy, Static
from gradscale.engine.probe_report import ProbeReport
from gradscale.torch import LossScaler, Verdict, watch
from gradscale.torch.probing import automatic
from gradscale.torch.step.result import SAMPLE_EVERY

LOG = "gradscale.torch.probing.automatic"


def two_blocks() -> Stack:
    torch.manual_seed(0)
    return Stack(Block(), Block())


class Loop:
    """A training loop whose batch is in a variable, as it is in a user's.

    Attributes:
        probed: batches of which the automatic probe has asked for the loss.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, after: int | None = 2, fused: bool = False, **settings: Any
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        self.scaler = LossScaler(model, policy, on_stuck="ignore")
        self.batch = rows()
        self.probed: list[Tensor] = []
        if after is not None:
            self.scaler.probe_after(after, self.again, **settings)

    def loss(self) -> Tensor:
        return fp16_step(self.model, self.batch)()

    def again(self) -> Tensor:
        self.probed.append(self.batch)
        return self.loss()

    def train(self, batches: list[Tensor]) -> list[bool]:
        """Returns whether each step was skipped."""
        found: list[bool] = []
        for self.batch in batches:
            self.scaler.backward(self.loss())
            found.append(self.scaler.step(self.optimizer).skipped())
            self.optimizer.zero_grad()
        return found


BAD = 1e6
"""What a batch is multiplied by to overflow FP16 in the forward pass."""


def good_and_bad(kinds: str) -> list[Tensor]:
    """Returns batches, `b` for one that overflows."""
    return [rows(seed) * (BAD if kind == "b" else 1.0) for seed, kind in enumerate(kinds)]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one probe follow another without a pause."""
    monkeypatch.setattr(automatic, "SHARE", 1.0)


def test_the_step_that_is_the_last_of_so_many_skips_is_probed() -> None:
    loop = Loop(two_blocks(), Static(1024.0), after=3)
    batches = good_and_bad("gbgbbbbg")
    assert loop.train(batches) == [False, True, False, True, True, True, True, False]
    assert loop.probed
    assert all(each is batches[5] for each in loop.probed)
    report = loop.scaler.last_probe
    assert report is not None
    assert (report.verdict, report.scale) == (Verdict.FORWARD_OVERFLOW, 1024.0)


def test_without_so_many_skips_in_a_row_the_step_is_never_run() -> None:
    loop = Loop(two_blocks(), Static(1024.0), after=2)
    loop.train(good_and_bad("gbgbgbggb"))
    assert loop.probed == []
    assert loop.scaler.last_probe is None


FAULTS: dict[str, tuple[Callable[[], tuple[nn.Module, Policy, Tensor]], Verdict, str]] = {}


def fault(verdict: Verdict, named: str) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        FAULTS[make.__name__] = make, verdict, named
        return make

    return add


@fault(Verdict.BROKEN_WEIGHTS, "parts.1.fc2.weight is inf or NaN before the step")
def nan_in_one_weight() -> tuple[nn.Module, Policy, Tensor]:
    model = two_blocks()
    with torch.no_grad():
        model.parts[1].fc2.weight[1, 2] = math.nan  # type: ignore[index]
    return model, Headroom(), rows()


@fault(Verdict.BROKEN_DATA, "an input, float32 of shape [8, 4] is inf or NaN")
def inf_in_the_input() -> tuple[nn.Module, Policy, Tensor]:
    x = rows()
    x[3, 1] = math.inf
    return two_blocks(), Headroom(), x


@fault(Verdict.FORWARD_OVERFLOW, "`mm` in parts.1 (Attention)")
def softmax_that_overflows() -> tuple[nn.Module, Policy, Tensor]:
    return Stack(Attention(), Attention(gain=1e4)), Headroom(), rows()


@fault(Verdict.FORWARD_OVERFLOW, "`add` in parts.1 (Block)")
def residual_add_that_overflows() -> tuple[nn.Module, Policy, Tensor]:
    model = two_blocks()
    nn.init.constant_(model.embed.bias, 40000.0)
    nn.init.constant_(model.parts[1].fc2.bias, 40000.0)  # type: ignore[arg-type]
    return model, Headroom(), rows()


@fault(Verdict.SCALE_TOO_HIGH, "the scale of 2**40 is too high for this step")
def scale_too_high() -> tuple[nn.Module, Policy, Tensor]:
    return two_blocks(), Static(2.0**40), rows()


@pytest.mark.parametrize("name", FAULTS)
def test_injected_faults_are_found_and_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, verdict, named = FAULTS[name]
    model, policy, x = make()
    loop = Loop(model, policy)
    assert loop.train([x] * 4) == [True] * 4
    report = loop.scaler.last_probe
    assert report is not None
    assert report.verdict is verdict
    assert report.operation is not None
    assert report.operation.source is not None
    (line,) = lines(caplog)
    assert line.startswith(f"2 steps in a row were skipped. A probe found: {verdict}: ")
    assert named in line
    assert str(report.operation.source) in line


def test_training_is_the_same_with_it(at_once: None) -> None:
    kinds = "gbbgggbbbg"

    def trained(after: int | None) -> tuple[list[Tensor], Any, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        loop = Loop(model, Dynamic(growth_interval=3), after)
        loop.scaler.protect_buffers()
        loop.train(good_and_bad(kinds))
        assert len(loop.probed) == 0 if after is None else loop.probed
        return [*model.state_dict().values()], loop.scaler.state_dict(), torch.rand(2)

    (found, state, random), (expected, expected_state, expected_random) = trained(2), trained(None)
    assert same(found, expected)
    assert state == expected_state
    assert torch.equal(random, expected_random)


def test_each_row_of_skips_is_probed_once_and_logged_once(at_once: None, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(two_blocks(), Static(1024.0))
    batches = good_and_bad("bbbbgbgbbb")
    loop.train(batches)
    assert {id(each) for each in loop.probed} == {id(batches[1]), id(batches[8])}
    assert len(lines(caplog)) == 1  # they say the same


def test_the_same_is_logged_again_after_a_while(
    at_once: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "EVERY_S", 0.0)
    Loop(two_blocks(), Static(1024.0)).train(good_and_bad("bbgbb"))
    assert len(lines(caplog)) == 2


def test_something_else_is_logged_at_once(at_once: None, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(two_blocks(), Static(1024.0))
    loop.train(good_and_bad("bbg"))
    loop.train([torch.full_like(rows(), math.nan)] * 2)
    assert [line.partition("found: ")[2].partition(":")[0] for line in lines(caplog)] == [
        "forward_overflow",
        "broken_data",
    ]


def test_probes_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    loop = Loop(two_blocks(), Static(1024.0))

    def slow(step: Any, scale: float, *, run: Any) -> ProbeReport:
        now_s[0] += 3.0
        return run(step, scale)

    probing: Any = _automatic(loop.scaler)
    probing.run = lambda step, scale, run=probing.run: slow(step, scale, run=run)
    loop.train(good_and_bad("bbg"))
    runs = len(loop.probed)
    assert runs > 0
    now_s[0] += 296.0  # 99 times as long as the probe would be 297
    loop.train(good_and_bad("bbg"))
    assert len(loop.probed) == runs
    now_s[0] += 2.0
    loop.train(good_and_bad("bbg"))
    assert len(loop.probed) > runs


def _automatic(scaler: LossScaler) -> Any:
    """Returns the object behind `probe_after`."""
    cells: Iterator[Any] = (cell.cell_contents for cell in scaler._memory.on_skips.__closure__ or ())  # type: ignore[attr-defined]
    return next(each for each in cells if isinstance(each, automatic.AutomaticProbe))


@pytest.mark.parametrize("returned", [KeyError("x"), torch.zeros(3), None], ids=["raises", "no scalar", "nothing"])
def test_a_step_that_fails_is_logged_and_training_goes_on(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(two_blocks(), Static(1024.0), after=None)
    calls: list[int] = []

    def failing() -> Any:
        calls.append(1)
        if isinstance(returned, Exception):
            raise returned
        return returned

    loop.scaler.probe_after(2, failing)
    assert loop.train(good_and_bad("bbbgbbbg")) == [True, True, True, False] * 2
    assert len(calls) == 1
    assert loop.scaler.last_probe is None
    assert lines(caplog) == ["The automatic probe is off: its step raised an error."]
    assert caplog.records[-1].exc_info is not None


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_an_error_in_the_backward_pass_of_the_step_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(two_blocks(), Static(2.0**40), after=None)

    def raising(grad: Tensor) -> Tensor:
        raise ArithmeticError("in the backward pass")

    def step() -> Tensor:
        output = loop.model(loop.batch)
        output.register_hook(raising)
        return output.square().mean()

    loop.scaler.probe_after(2, step)
    assert loop.train([rows()] * 3) == [True] * 3
    assert lines(caplog) == ["The automatic probe is off: its step raised an error."]


def test_what_is_asked_for_with_the_report_may_end_training() -> None:
    class Stop(Exception):
        pass

    def stop(report: ProbeReport) -> None:
        raise Stop(report.verdict)

    loop = Loop(two_blocks(), Static(1024.0), on_report=stop)
    with pytest.raises(Stop, match="forward_overflow"):
        loop.train(good_and_bad("gbbb"))
    assert loop.scaler.last_probe is not None
    # The step was complete: the loop can go on.
    loop.optimizer.zero_grad()
    assert loop.train(good_and_bad("g")) == [False]


def test_another_batch_tells_a_bad_batch() -> None:
    model = two_blocks()
    loop = Loop(model, Static(1024.0), other=fp16_step(model))
    loop.train(good_and_bad("bb"))
    assert loop.scaler.last_probe is not None
    assert loop.scaler.last_probe.verdict is Verdict.BAD_BATCH


@pytest.mark.cpu_only("a stuck run is known late")
def test_the_report_comes_before_a_stuck_run_is_raised() -> None:
    loop = Loop(two_blocks(), Static(1024.0), after=None)
    loop.scaler = LossScaler(loop.model, Static(1024.0), max_consecutive_skips=2)
    loop.scaler.probe_after(2, loop.again)
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        loop.train(good_and_bad("bb"))
    assert loop.scaler.last_probe is not None


def test_inside_the_closure_of_an_optimizer() -> None:
    model = two_blocks()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    scaler = LossScaler(model, Static(1024.0), on_stuck="ignore")
    present = [rows()]

    def evaluate() -> Tensor:
        return fp16_step(model, present[0])()

    scaler.probe_after(2, evaluate)
    before = weights(model)
    for present[0] in good_and_bad("bb" * SAMPLE_EVERY):  # on a device it is known late
        optimizer.step(scaler.closure(evaluate, optimizer))
    assert scaler.last_probe is not None
    assert scaler.last_probe.verdict is Verdict.FORWARD_OVERFLOW
    assert same(weights(model), before)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_probe_is_not_watched(by_hand: bool) -> None:
    """The step that was skipped is recorded once, and so is the next."""
    loop = Loop(two_blocks(), Static(1024.0), after=None if by_hand else 1)
    watched = watch(loop.model, loop.scaler, every=1)
    loop.scaler.backward(fp16_step(loop.model)())
    if by_hand:
        loop.scaler.probe(fp16_step(loop.model))
    loop.scaler.step(loop.optimizer)
    loop.optimizer.zero_grad()
    loop.train(good_and_bad("bg"))
    found = [(row.step, row.elements) for row in watched.rows() if (row.name, row.kind) == ("embed", "output")]
    assert found == [(0, 32), (1, 32), (2, 32)]
    assert by_hand or loop.probed


def test_copies_and_pickles_of_the_scaler_do_not_probe() -> None:
    loop = Loop(two_blocks(), Static(1024.0))
    loop.train(good_and_bad("bb"))
    runs = len(loop.probed)
    copied = copy.deepcopy(loop.scaler)
    assert str(pickle.loads(pickle.dumps(loop.scaler)).last_probe) == str(loop.scaler.last_probe)
    loop.scaler = copied
    loop.train(good_and_bad("gbb"))
    assert len(loop.probed) == runs


def test_a_loaded_state_keeps_it() -> None:
    loop = Loop(two_blocks(), Static(1024.0))
    loop.scaler.load_state_dict(loop.scaler.state_dict())
    loop.train(good_and_bad("bb"))
    assert loop.probed


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(ValueError, match="`probe_after` needs the model"):
        LossScaler().probe_after(2, lambda: torch.zeros(()))
    with pytest.raises(ValueError, match=r"`skips` must be between 1 and 2\*\*31 - 1. Received: skips=0"):
        LossScaler(two_blocks()).probe_after(0, lambda: torch.zeros(()))
    with pytest.raises(TypeError, match=r"must be a function that returns the loss\. Received: Tensor"):
        LossScaler(nn.Linear(1, 1)).probe_after(1, torch.ones(()))  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_a_device")
class TestOnADevice:
    """The host learns of a skipped step at the next loss."""

    def test_a_run_that_skips_is_probed_at_the_step_at_which_it_is_known(self) -> None:
        loop = Loop(two_blocks(), Static(1024.0), fused=True)
        batches = good_and_bad("ggbbb")
        for loop.batch in batches:
            loop.scaler.backward(loop.loss())
            loop.scaler.step(loop.optimizer)
            loop.optimizer.zero_grad()
        assert loop.probed
        assert loop.probed[0] is batches[4]
        assert loop.scaler.last_probe is not None
        assert loop.scaler.last_probe.verdict is Verdict.FORWARD_OVERFLOW


@pytest.mark.simulated_only
@pytest.mark.parametrize("kinds", ["g" * 40, "gb" * 20])
def test_on_a_device_nothing_waits_while_there_is_nothing_to_probe(kinds: str) -> None:
    loop = Loop(two_blocks(), Static(1024.0), fused=True)
    found = host.Waits()
    for loop.batch in good_and_bad(kinds):
        loss = loop.loss()
        with host.waits() as waits:
            loop.scaler.backward(loss)
            loop.scaler.step(loop.optimizer)
        loop.optimizer.zero_grad()
        found.reads += waits.reads
        found.uploads += waits.uploads
    assert loop.probed == []
    assert (found.reads, found.uploads) == ([], [])


def test_the_step_finds_the_batch_in_the_variables_of_a_loop() -> None:
    """As on the page: a lambda that is made before the loop."""
    model = two_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = LossScaler(model, Static(1024.0))
    seen: list[float] = []

    def loss_fn(x: Tensor) -> Tensor:
        with autocast():
            return model(x).float().square().mean()

    def noted(x: Tensor) -> Tensor:
        seen.append(float(x[0, 0]))
        return loss_fn(x)

    x = rows()
    scaler.probe_after(2, lambda: noted(x))
    for x in good_and_bad("gbbg"):
        scaler.backward(loss_fn(x))
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert seen == [float(good_and_bad("gbbg")[2][0, 0])]
