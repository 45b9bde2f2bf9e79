"""The example in 200 lines does what the library does: the same scales, skips and weights, bit for bit."""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.examples.run import EXAMPLES, lines_printed

from gradscale import Dynamic, Headroom
from gradscale.engine import measurement
from gradscale.policies.contract import Policy, Seen
from gradscale.torch.step import apply

torch = pytest.importorskip("torch")
LossScaler = pytest.importorskip("gradscale.torch").LossScaler

NAME = "loss_scaling_in_200_lines"
PATH = EXAMPLES / f"{NAME}.py"
STEPS = 60
CLIP_NORM = 0.6  # binds at some steps

FAULTS = {
    5: "overflow",
    11: "NaN loss",
    **dict.fromkeys((18, 19, 20), "overflow"),
    24: "NaN gradient",
    30: "inf loss",
    33: "zeros",
    **dict.fromkeys(range(40, 46), "overflow"),
    50: "larger",
    57: "inf gradient",
}
"""What is wrong with which step."""

FAULTS_AT_THE_START = {0: "overflow", 1: "NaN loss", 2: "zeros", 3: "zeros", 9: "NaN gradient"}
"""The same before any gradient was seen."""

LOSS_TIMES = {"overflow": 2.0**40, "NaN loss": torch.nan, "inf loss": torch.inf, "zeros": 0.0, "larger": 8.0}
ELEMENT_OF_A_GRADIENT = {"NaN gradient": torch.nan, "inf gradient": -torch.inf}

POLICIES = {
    "dynamic": {"growth_interval": 4},
    "dynamic-bounds": {"growth_interval": 2, "min_scale": 2.0**14, "max_scale": 2.0**17},
    "auto": {},
}
"""Settings of the rules. `auto` has none."""

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, which runs nothing."""
    spec = importlib.util.spec_from_file_location(NAME, PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[NAME]


def rules(example: ModuleType, name: str) -> tuple[Callable[[Any, Any], Any], Any, Policy | str]:
    """Returns a rule of the example, its first state, and the library's policy."""
    if name == "auto":
        return example.auto, example.State(scale=16.0), "auto"
    settings = POLICIES[name]
    start = example.State(scale=2.0**16)
    return lambda state, seen: example.dynamic(state, seen, **settings), start, Dynamic(**settings)


class Run:
    """The same model, batches, optimizer and faults for both."""

    def __init__(self, optimizer: str, faults: dict[int, str]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.faults = faults
        self.batches = torch.Generator().manual_seed(1)

    def loss(self, step: int) -> Any:
        x = torch.randn(16, 8, generator=self.batches)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(x), x.argmax(1) % 4)
        return loss * LOSS_TIMES.get(self.faults.get(step, ""), 1.0)

    def break_gradient(self, step: int) -> None:
        if (element := ELEMENT_OF_A_GRADIENT.get(self.faults.get(step, ""))) is not None:
            self.model[0].weight.grad[3, 2] = element

    def bits(self) -> list[bytes]:
        """Returns all weights and all of the optimizer's state."""
        kept = [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        return [value.detach().numpy().tobytes() for value in (*self.model.parameters(), *kept)]


def steps_of_example(example: ModuleType, rule: str, run: Run, clip_norm: float | None) -> Iterator[Any]:
    move, state, _ = rules(example, rule)
    for step in range(STEPS):
        loss = run.loss(step)
        example.backward(loss, state)
        run.break_gradient(step)
        after, seen = example.step(move, state, run.optimizer, loss, clip_norm)
        run.optimizer.zero_grad()
        yield state.scale, seen.clean, seen.loss_finite, after.scale, run.bits()
        state = after


def steps_of_library(example: ModuleType, rule: str, run: Run, clip_norm: float | None) -> Iterator[Any]:
    scaler = LossScaler(run.model, rules(example, rule)[2])
    for step in range(STEPS):
        scaler.backward(run.loss(step))
        run.break_gradient(step)
        result = scaler.step(run.optimizer, clip_norm=clip_norm)
        run.optimizer.zero_grad()
        yield (
            result.scale.item(),
            not result.skipped(),
            bool(result.loss_finite),
            scaler.loss_scale.item(),
            run.bits(),
        )


def check_equal(
    example: ModuleType, rule: str, optimizer: str, clip_norm: float | None, faults: dict[int, str], steps: int = STEPS
) -> list[Any]:
    """Fails unless both do the same at each of the first steps, and returns what they did."""
    ours = list(steps_of_example(example, rule, Run(optimizer, faults), clip_norm))[:steps]
    theirs = list(steps_of_library(example, rule, Run(optimizer, faults), clip_norm))[:steps]
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one[:-1] == other[:-1], step
        assert one[-1] == other[-1], f"weights or optimizer state after step {step}"
    return ours


@pytest.mark.parametrize("faults", [FAULTS, FAULTS_AT_THE_START], ids=["later", "at the start"])
@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", POLICIES)
def test_scales_skips_and_weights_are_those_of_the_library(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    optimizer: str,
    clip_norm: float | None,
    faults: dict[int, str],
) -> None:
    # The example reads amax and norm at each clipped step. The library reads amax at the first 16 and then at every
    # 16th, and between them estimates it from the norm; here it is told to read it every time. Nothing else is changed.
    monkeypatch.setattr(apply, "AMAX_EVERY", 1)
    done = check_equal(example, rule, optimizer, clip_norm, faults)
    # What is not finite at any scale is skipped, and so is the first of a series of overflows. A scale that has fallen
    # far enough saves the others, and one that grows too far overflows without a fault.
    skips = {step for step, (_, clean, *_) in enumerate(done) if not clean}
    assert skips >= {step for step, fault in faults.items() if fault.startswith(("NaN", "inf"))} | {min(faults)}
    assert len({scale for scale, *_ in done}) > 2
    weights = [bits for *_, bits in done]
    assert weights[-1] != weights[0]


@pytest.mark.parametrize("rule", POLICIES)
def test_the_library_as_it_is_does_the_same_as_long_as_it_reads_what_the_example_reads(
    example: ModuleType, rule: str
) -> None:
    steps = measurement.AMAX_EVERY if rule == "auto" else STEPS
    assert steps > max(FAULTS_AT_THE_START)
    check_equal(example, rule, "adamw", CLIP_NORM, FAULTS_AT_THE_START, steps)


def test_clipping_binds_at_some_of_these_steps(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    unscale_and_clip = example.unscale_and_clip
    monkeypatch.setattr(example, "unscale_and_clip", lambda *args: measured.append(args[1]) or unscale_and_clip(*args))
    list(steps_of_example(example, "auto", Run("sgd", FAULTS), CLIP_NORM))
    bound = sum(norm > CLIP_NORM for norm in measured)
    assert 5 < bound < len(measured) - 5


def sequences(rng: np.random.Generator, steps: int) -> Iterator[Seen]:
    """Yields gradients that drift and jump, zeros, and overflows and bad losses, alone and in series.

    In half of the sequences the first 20 to 60 steps show no gradient: zeros, overflows and bad losses alone.
    """
    blank = rng.integers(20, 60) * rng.integers(2)
    size, calm = 10.0 ** rng.uniform(-12, 3), rng.uniform(0.8, 1.0)
    worse = 0.0
    for step in range(steps):
        size = min(max(size * 2.0 ** rng.normal(0, 0.3 if rng.random() < 0.98 else 8), 1e-20), 1e10)
        worse = rng.random() if rng.random() > calm else worse * (rng.random() < 0.5)
        finite, loss_finite = worse < 0.4, worse < 0.8
        amax = 0.0 if 0.3 < worse < 0.4 or step < blank else size
        yield Seen(np.bool_(finite), np.bool_(loss_finite), np.float32(amax if finite else np.inf))


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
@pytest.mark.parametrize("rule", POLICIES)
def test_the_rule_is_that_of_the_library_in_its_arithmetic_for_thousands_of_steps(
    example: ModuleType, rule: str, seed: int
) -> None:
    # The library computes in float32, on every framework. Given such numbers, so does the example, operation by
    # operation. With Python's, peak and ceiling have more digits, and a scale could differ where one of its two bounds
    # is a power of two to the last digit of float32.
    move, state, named = rules(example, rule)
    policy = Headroom() if isinstance(named, str) else named
    theirs = policy.start()
    names = [field.name for field in fields(example.State) if hasattr(theirs, field.name)]
    for seen in sequences(np.random.default_rng(seed), 2000):
        single = {name: np.float32(getattr(state, name)) for name in names if name != "clean_steps"}
        ours = example.Seen(bool(seen.finite), bool(seen.loss_finite), seen.amax, np.float32(0))
        state = move(replace(state, **single), ours)
        theirs = policy.next(theirs, seen, np)
        assert [float(getattr(state, name)) for name in names] == [float(getattr(theirs, name)) for name in names]


def test_it_has_at_most_200_lines_and_imports_nothing_of_gradscale() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) <= 200
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {name.partition(".")[0] for name in imported} == {"collections", "dataclasses", "math", "torch"}


def test_the_files_that_it_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PATH.read_text()))
    assert len(named) >= 12
    folders = EXAMPLES, EXAMPLES.parent / "src/gradscale"
    assert [name for name in sorted(named) if not any((folder / name).is_file() for folder in folders)] == []


def test_it_shows_a_run_that_learns_nothing_and_two_that_learn_with_skips_of_both_kinds() -> None:
    printed = "\n".join(lines_printed(NAME))
    losses = [tuple(map(float, pair)) for pair in re.findall(r"^loss ([\d.]+) -> ([\d.]+)", printed, re.MULTILINE)]
    (before, after), *scaled = losses
    assert after > 0.8 * before
    assert len(scaled) == 2
    assert all(after < 0.1 * before for before, after in scaled)
    assert printed.count("120  2^") == printed.count("skipped, loss not finite") == 3
    assert printed.count("skipped, overflow") > 3
