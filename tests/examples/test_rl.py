"""The example of reinforcement learning: how far sampling and training disagree, skips, and resumed runs."""

import importlib
import re
import sys
from copy import deepcopy
from typing import Any

import pytest
from tests.examples.run import EXAMPLES, lines_printed

from gradscale import Dynamic

torch = pytest.importorskip("torch")
LossScaler = pytest.importorskip("gradscale.torch").LossScaler


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module, which runs nothing; it imports its neighbor by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("torch_rl_fp16")
    for name in ("torch_rl_fp16", "rl_policy"):
        del sys.modules[name]


def states(run: Any) -> dict[str, Any]:
    """Returns copies of everything that a checkpoint of the run holds."""
    names = ("model", "optimizer", "scaler", "ema", "reference")
    return {name: deepcopy(part.state_dict()) for name, part in zip(names, run.parts, strict=True)}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return ours == theirs


@pytest.mark.parametrize("seed", [0, 1])
def test_importance_ratios_are_closer_to_1_in_fp16_than_in_bf16(example: Any, seed: int) -> None:
    bf16, fp16 = (example.Run(dtype, seed).train(4)[0] for dtype in (torch.bfloat16, torch.float16))
    # FP16 has 3 more bits, so that its errors are an eighth; they depend on the kernels, and so on the CPU.
    assert 0 < fp16.abs().mean() < bf16.abs().mean() / 3


def test_a_skipped_update_moves_neither_weights_nor_optimizer_nor_average_nor_reference(example: Any) -> None:
    run = example.Run(torch.float16)
    run.train(4)
    run.scaler.load_state_dict(LossScaler(policy=Dynamic(init_scale=2.0**40)).state_dict())
    before = states(run)
    run.update()
    assert run.scaler.last.skipped()
    after = states(run)
    assert {name for name in before if not same(before[name], after[name])} == {"scaler"}


def test_an_applied_update_moves_all_of_them(example: Any) -> None:
    run = example.Run(torch.bfloat16)
    before = states(run)
    run.update()
    assert not any(same(before[name], value) for name, value in states(run).items())


@pytest.mark.parametrize("updates", [1, 4])
def test_a_resumed_run_is_bit_exact(example: Any, updates: int) -> None:
    run, other = example.Run(torch.float16), example.Run(torch.float16, seed=1)
    run.train(updates)
    saved = example.save_parts(run.parts)
    log_ratios, reward = run.train(3)
    example.load_parts(other.parts, saved)
    resumed_log_ratios, resumed_reward = other.train(3)
    assert torch.equal(resumed_log_ratios, log_ratios)
    assert torch.equal(resumed_reward, reward)
    assert same(states(other), states(run))


def test_ratios_that_are_no_rounding_errors_are_refused(example: Any) -> None:
    with pytest.raises(RuntimeError, match=r"must be within 0.25 of 1. Received: one that is off by 0.649. Compare"):
        example.check_ratios(torch.tensor([0.0, 0.5]))
    with pytest.raises(RuntimeError, match="off by nan"):
        example.check_ratios(torch.tensor([0.0, torch.nan]))


def test_weights_that_the_sampler_did_not_get_are_noticed(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = example.Run(torch.float16)
    monkeypatch.setattr(run.sampler, "load_state_dict", lambda state: None)
    with pytest.raises(RuntimeError, match="Importance ratios of unchanged weights"):
        run.update()


@pytest.mark.slow
def test_the_program_shows_both_formats_and_resumes() -> None:
    printed = "\n".join(lines_printed("torch_rl_fp16"))
    bf16, fp16 = (
        re.search(rf"^{name} +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE) for name in ("bfloat16", "float16")
    )
    assert bf16 is not None
    assert fp16 is not None
    assert all(float(ours) < float(theirs) / 3 for ours, theirs in zip(fp16.groups(), bf16.groups(), strict=True))
    assert "resumed in the middle: the same weights at the end" in printed
