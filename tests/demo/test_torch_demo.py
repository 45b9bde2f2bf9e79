"""The demo in PyTorch: its data, its models, its runs, and the program."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.demo import load_demo, loop
from examples.demo.data import AHEAD_WEIGHT, LENGTH, SEQUENCES, VOCABULARY, Text, load_digits, load_text
from examples.demo.loop import Stopped, Workers
from examples.demo.runs import Comparison, Run
from tests.demo.five_recipes import RECIPES, invoke

from gradscale.formats import FP16

torch = pytest.importorskip("torch")

from examples.demo.with_torch import GPT, DigitsTask, LanguageTask, draw_from  # noqa: E402

CPU = torch.device("cpu")
STEPS = 3

MODELS = ("cnn", "gpt")


def compare(plan: Mapping[str, int], seed: int, tick: Callable[[str, str], None]) -> list[Comparison]:
    return loop.compare(load_demo("torch"), plan, seed, tick)


def compared(steps: int = STEPS, seed: int = 0) -> dict[str, list[Run]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAMPLE_EVERY", 1)
        comparisons = compare(dict.fromkeys(MODELS, steps), seed, lambda model, recipe: None)
    return {comparison.subject.model: list(comparison.runs) for comparison in comparisons}


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text()


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    return compared()


def test_the_text_is_half_a_megabyte_of_every_character(text: Text) -> None:
    together = torch.from_numpy(np.concatenate([text.train, text.test]))
    assert 300_000 < len(together) < 1_000_000
    assert set(together.unique().tolist()) == set(range(len(VOCABULARY)))
    assert "import" in "".join(VOCABULARY[number] for number in text.train[:20_000].tolist())


def test_a_batch_of_text_is_stretches_of_the_training_text(text: Text) -> None:
    short = Text(np.arange(50), np.arange(0))
    rows = torch.from_numpy(short.batch(draw_from(torch.Generator().manual_seed(0)), 1000, 10))
    assert rows.shape == (1000, 10)
    assert torch.equal(rows.diff(), torch.ones(1000, 9, dtype=torch.int64))
    assert (rows.min(), rows.max()) == (0, 49)


def test_the_gpt_does_not_see_what_it_is_to_predict() -> None:
    model = GPT(vocabulary=9, length=8, width=16, heads=2, depth=2)
    words = torch.randint(9, (1, 8))
    changed = words.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 9
    before, after = model(words), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_two_heads_are_trained_on_the_next_character_and_the_one_after(text: Text) -> None:
    task = LanguageTask(text, CPU)
    batch = task.batch(torch.Generator().manual_seed(0))

    class Oracle(torch.nn.Module):
        def forward(self, seen: Any) -> tuple[Any, Any]:
            hot = 100 * torch.nn.functional.one_hot(batch, len(VOCABULARY)).float()
            assert torch.equal(seen, batch[:, :-2])
            return hot[:, 1:-1], hot[:, 2:]

    assert [float(loss) for loss in task.losses(Oracle(), batch)] == [0.0, 0.0]


def test_the_second_heads_gradient_is_too_small_for_fp16() -> None:
    assert AHEAD_WEIGHT / (LENGTH * SEQUENCES) < FP16.smallest_subnormal / 2


def test_the_six_recipes_are_run_in_order(runs: dict[str, list[Run]]) -> None:
    assert tuple(runs) == tuple(load_demo("torch").steps) == MODELS
    for model in MODELS:
        expected = (*(name for name in RECIPES if name != "FP16 Static"), "FP8 unscaled", "FP8 Headroom")
        assert tuple(run.recipe for run in runs[model]) == expected
        assert all(len(run.losses) == len(run.scales) == STEPS for run in runs[model])


def test_every_recipe_starts_from_the_same_weights_and_batches(runs: dict[str, list[Run]]) -> None:
    for model in MODELS:
        full, *narrow = (run.losses[0] for run in runs[model])
        halves, eighths = narrow[:3], narrow[3:]
        assert halves == [halves[0]] * 3
        assert eighths == [eighths[0]] * 2
        assert len({full, halves[0], eighths[0]}) == 3
        assert full == pytest.approx(halves[0], rel=1e-3)
        assert full == pytest.approx(eighths[0], rel=1e-2)


def test_a_seed_gives_the_same_runs_again(runs: dict[str, list[Run]]) -> None:
    again = compared()
    for model in MODELS:
        for one, other in zip(again[model], runs[model], strict=True):
            assert (one.losses, one.scales, one.lost, one.scores) == (
                other.losses,
                other.scales,
                other.lost,
                other.scores,
            )


def test_another_seed_gives_other_runs(runs: dict[str, list[Run]]) -> None:
    other = compared(steps=1, seed=1)
    assert all(other[model][0].losses[0] != runs[model][0].losses[0] for model in MODELS)


def test_training_leaves_torchs_random_numbers_and_threads_alone(runs: dict[str, list[Run]]) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    compare({"cnn": 1}, 0, lambda model, recipe: None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_scale_that_starts_too_high_overflows_and_halves(runs: dict[str, list[Run]]) -> None:
    for model in MODELS:
        dynamic = runs[model][3]
        assert dynamic.skipped == list(range(STEPS))
        assert dynamic.scales == [2.0 ** (32 - step) for step in range(STEPS)]


def test_the_histogram_holds_activations_too(runs: dict[str, list[Run]]) -> None:
    parameters = sum(p.numel() for p in DigitsTask(load_digits(0), CPU).model().parameters())
    histogram = runs["cnn"][0].histogram
    assert histogram.nonzero + int(histogram.zeros) > 2 * parameters


def test_only_unscaled_runs_lose_gradients(runs: dict[str, list[Run]]) -> None:
    for model, at_least, fp8_share in (("cnn", 0.4, 0.1), ("gpt", 0.08, 0.25)):
        full, unscaled, headroom, dynamic, fp8_unscaled, fp8_headroom = runs[model]
        assert set(full.lost) == {0.0}
        assert min(unscaled.lost) > at_least
        first, *later = headroom.lost
        assert first < min(unscaled.lost)  # at a scale of 16
        assert max(later + dynamic.lost) < 0.01
        assert min(fp8_unscaled.lost) > min(unscaled.lost)
        first, *later = fp8_headroom.lost
        assert first < min(fp8_unscaled.lost)
        assert max(later) < fp8_share * min(fp8_unscaled.lost)


def test_every_step_is_reported() -> None:
    reported: list[tuple[str, str]] = []
    plan = {"cnn": 2, "gpt": 1}
    compare(plan, 0, lambda model, recipe: reported.append((model, recipe)))
    assert dict(Counter(reported)) == load_demo("torch").runs(plan)


def test_an_error_stops_the_other_runs() -> None:
    def fail(model: str, recipe: str) -> None:
        raise RuntimeError("the screen is gone")

    with pytest.raises(RuntimeError, match="the screen is gone"):
        compare({"cnn": 100_000}, 0, fail)


def test_work_whose_result_is_not_needed_is_stopped() -> None:
    workers, begun = Workers(threads=1), threading.Event()
    futures: list[Future[None]] = []

    def work() -> None:
        while True:
            workers.check()
            begun.set()

    def give_up() -> None:
        with workers:
            futures.append(workers.submit(work))
            begun.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give_up()
    assert isinstance(futures[0].exception(), Stopped)


def test_the_command_takes_torch_where_it_is_installed(tmp_path: Path) -> None:
    shown = invoke("--steps", 1, "--out", tmp_path / "plot.png")
    assert shown.exit_code == 0
    assert "cnn" in shown.stdout
    assert "perplexity" in shown.stdout
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_one_model_can_be_chosen(tmp_path: Path) -> None:
    shown = invoke("--steps", 1, "--model", "gpt", "--out", tmp_path)
    assert shown.exit_code == 0
    assert "perplexity" in shown.stdout
    assert "cnn" not in shown.stdout


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    shown = invoke("--framework", "torch", "--model", "bert", "--out", tmp_path)
    assert shown.exit_code == 2
    assert "`--model` must be one of all, cnn, gpt. Received: 'bert'." in shown.stderr


@pytest.mark.slow
def test_unscaled_fp16_and_fp8_fail_where_fp32_and_scaled_runs_learn() -> None:
    comparisons = compare(load_demo("torch").steps, 0, lambda model, recipe: None)
    cnn, gpt = (comparison.runs for comparison in comparisons)

    accuracy = [run.scores["accuracy"] for run in cnn]
    assert max(accuracy[1], accuracy[4]) < 0.2
    assert min(accuracy[0], *accuracy[2:4], accuracy[5]) > 0.8
    assert np.mean(cnn[1].lost) > 0.4
    assert np.mean(cnn[4].lost) > 0.6

    perplexity = [run.scores["perplexity"] for run in gpt]
    assert min(perplexity[1], perplexity[4]) > 0.9 * len(VOCABULARY)
    assert max(perplexity[0], *perplexity[2:4], perplexity[5]) < 15
    main_head = [run.scores["main head"] for run in gpt]
    assert max(main_head) < 1.1 * min(main_head)  # nothing but the second head shows that something is wrong
