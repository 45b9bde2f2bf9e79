"""The demo as a whole: the comparison, the table, the plot, and the program."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.demo import FRAMEWORKS, __main__, load_demo
from examples.demo.data import AUTOENCODER, TEST_DIGITS, Digits, load_digits
from examples.demo.loop import SEEDS, compare
from examples.demo.runs import Comparison, Gradients, Run, Step
from examples.demo.show import make_table, save_plot, smoothed
from rich.console import Console
from tests.demo import five_recipes
from tests.demo.five_recipes import RECIPES, Shown, compared

from gradscale._extras import installed
from gradscale.histogram import best_static_scale, overflow_share

STEPS = 12


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(seed=0)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return compared("numpy", STEPS)


def test_the_digits_are_split_and_none_is_in_both_parts(digits: Digits) -> None:
    assert (len(digits.images), len(digits.test_images)) == (1797 - TEST_DIGITS, TEST_DIGITS)
    assert (digits.images.dtype, digits.images.min(), digits.images.max()) == (np.float32, 0.0, 1.0)
    other = load_digits(seed=1)
    together = np.concatenate([digits.images, digits.test_images])
    shuffled = np.concatenate([other.images, other.test_images])
    assert sorted(map(bytes, together)) == sorted(map(bytes, shuffled))


def test_the_five_recipes_are_run_in_order(runs: list[Run]) -> None:
    assert tuple(run.recipe for run in runs) == RECIPES
    assert all(len(run.losses) == len(run.scales) == STEPS for run in runs)


def test_every_recipe_starts_from_the_same_weights_and_batches(runs: list[Run]) -> None:
    first = [run.losses[0] for run in runs]
    assert first == pytest.approx([first[0]] * 5, rel=1e-3)
    assert first[1] == first[2] == first[3] == first[4]


def test_a_seed_gives_the_same_runs_again(runs: list[Run]) -> None:
    for again, run in zip(compared("numpy", STEPS), runs, strict=True):
        assert (again.losses, again.scales, again.lost, again.scores) == (
            run.losses,
            run.scales,
            run.lost,
            run.scores,
        )


def test_another_seed_gives_other_runs(runs: list[Run]) -> None:
    assert compared("numpy", 1, seed=1)[0].losses[0] != runs[0].losses[0]


def test_the_static_scale_comes_from_the_gradients_of_the_fp32_run(runs: list[Run]) -> None:
    full, _, static, *_ = runs
    assert set(static.scales) == {best_static_scale(full.histogram)}
    assert overflow_share(full.histogram, scale=static.scales[0]) == 0.0


def test_every_step_is_reported() -> None:
    reported: list[str] = []
    compare(load_demo("numpy"), {"autoencoder": 3}, 0, lambda model, recipe: reported.append(recipe))
    assert reported == [*(recipe for recipe in RECIPES for _ in range(3)), *[SEEDS] * 6]
    assert dict(Counter(reported)) == {run: n for (_, run), n in load_demo("numpy").runs({"autoencoder": 3}).items()}


def test_the_initial_scores_and_those_of_fp32_with_other_seeds_are_kept() -> None:
    (comparison,) = compare(load_demo("numpy"), {"autoencoder": 1}, 5, lambda model, recipe: None)
    assert list(comparison.other_seeds) == [6, 7]
    assert comparison.other_seeds[6] == compared("numpy", 1, seed=6)[0].scores
    assert comparison.untrained["pixel error"] > comparison.runs[0].scores["pixel error"]


def test_fp32_loses_nothing_and_unscaled_fp16_loses_half(runs: list[Run]) -> None:
    full, unscaled, static, *_ = runs
    assert set(full.lost) == {0.0}
    assert min(unscaled.lost) > 0.4
    assert max(static.lost) < 0.01


def test_a_skipped_step_is_not_counted_as_lost() -> None:
    zeros, ones = [np.zeros(3, np.float32)], [np.ones(3, np.float32)]
    run = Run("FP16 Dynamic")
    run.add(Step(1.0, 2.0**32, True, Gradients(zeros, ones, [])))
    assert (run.sampled, run.lost, run.histogram.nonzero) == ([], [], 3)
    assert np.isnan(run.share_lost())
    run.add(Step(1.0, 2.0**16, False, Gradients(zeros, ones, [])))
    assert (run.sampled, run.lost, run.share_lost()) == ([1], [1.0], 1.0)


def test_the_table_has_a_row_for_each_run_and_fits_a_terminal(runs: list[Run]) -> None:
    written = io.StringIO()
    Console(width=80, file=written).print(make_table(Comparison(AUTOENCODER, runs, {}, {})))
    text = written.getvalue()
    for run in runs:
        assert run.recipe in text
        assert f"{run.scores['accuracy']:.1%}" in text


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_the_same_runs_draw_the_same_plot(runs: list[Run], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_plot([Comparison(AUTOENCODER, runs, {}, {})], path)
    first = path.read_bytes()
    save_plot([Comparison(AUTOENCODER, runs, {}, {})], path)
    assert path.read_bytes() == first
    assert first.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_smoothing_starts_at_the_first_value_and_skips_what_is_not_finite() -> None:
    assert smoothed([2.0, 2.0, float("inf"), float("nan"), 3.0]) == pytest.approx([2.0, 2.0, 2.0, 2.0, 2.1])


def invoke(*arguments: Any) -> Shown:
    return five_recipes.invoke("--framework", "numpy", *arguments)


def test_the_command_trains_and_writes_the_plot(tmp_path: Path) -> None:
    shown = invoke("--steps", 3, "--seed", 1, "--out", tmp_path / "new" / "plot.svg")
    assert shown.exit_code == 0
    assert all(recipe in shown.stdout for recipe in RECIPES)
    assert (tmp_path / "new" / "plot.svg").stat().st_size > 1000


def test_the_command_announces_the_time_and_ends_with_a_verdict(tmp_path: Path) -> None:
    shown = invoke("--steps", 80, "--out", tmp_path).stdout
    announced = "Training autoencoder (80 steps) 5 ways, and FP32 with 2 more seeds.\nThis takes about "
    assert shown.startswith(announced)
    assert "autoencoder: " in shown


@pytest.mark.parametrize("framework", [name for name, needed in FRAMEWORKS.items() if all(map(installed, needed))])
def test_the_announcement_fits_80_columns(framework: str) -> None:
    demo = load_demo(framework)
    announced = __main__.announcement(demo, demo.steps)
    assert max(map(len, announced.splitlines())) <= 80


def test_a_single_step_is_not_announced_as_several(tmp_path: Path) -> None:
    assert "Training autoencoder (1 step) 5 ways" in invoke("--steps", 1, "--out", tmp_path).stdout


def test_json_has_the_ends_of_the_runs_and_nothing_else_is_printed(tmp_path: Path) -> None:
    printed = json.loads(invoke("--steps", 2, "--out", tmp_path / "plot.svg", "--json").stdout)
    (model,) = printed["models"]
    assert [run["run"] for run in model["runs"]] == list(RECIPES)
    assert model["runs"][4]["skipped"] == [0, 1]
    assert model["other_seeds"].keys() == {"1", "2"}
    assert model["verdict"]


def test_the_folder_of_the_plot_is_not_made_for_a_command_that_is_refused(tmp_path: Path) -> None:
    assert invoke("--model", "gpt", "--out", tmp_path / "new" / "plot.png").exit_code == 2
    assert not (tmp_path / "new").exists()


def test_command_that_is_interrupted_leaves_no_file_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        assert not any(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        invoke("--steps", 1, "--out", tmp_path / "new" / "sub" / "plot.png")
    assert not any(tmp_path.iterdir())


def test_check_of_the_plot_keeps_an_older_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plot.png").write_text("older")
    monkeypatch.setattr(__main__, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        invoke("--steps", 1, "--out", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_text() == "older"


def test_a_folder_gets_a_plot_of_its_own(tmp_path: Path) -> None:
    assert invoke("--steps", 1, "--out", tmp_path / "v1.2").exit_code == 2
    (tmp_path / "v1.2").mkdir()
    assert invoke("--steps", 1, "--out", tmp_path / "v1.2").exit_code == 0
    assert (tmp_path / "v1.2" / "demo.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--out", "plot.gif"),
            "`--out` must be a folder, or a file that ends in .png or .svg. Received: plot.gif.",
        ),
        (("--out", "/dev/null/plot.png"), "`--out` must be in a folder, and /dev/null is a file. Received: /dev/null/"),
        (("--out", "/dev/null"), "`--out` must be a folder, or a file that ends in .png or .svg. Received: /dev/null."),
        (("--steps", 0), "`--steps` must be at least 1. Received: 0."),
        (("--seed", -1), "`--seed` must be at least 0. Received: -1."),
        (("--model", "gpt"), "`--model` must be one of all, autoencoder. Received: 'gpt'."),
        (("--framework", "caffe"), f"`--framework` must be one of {', '.join(FRAMEWORKS)}. Received: 'caffe'."),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(arguments: tuple[Any, ...], text: str) -> None:
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert text in shown.stderr


@pytest.mark.parametrize("missing", [("torch", "jax", "keras"), ("torch", "optax", "keras")])
def test_without_torch_keras_and_all_of_jax_the_command_takes_numpy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        __main__, "_missing", lambda *needed: [name for name in needed if name in missing or not installed(name)]
    )
    shown = five_recipes.invoke("--steps", 1, "--out", tmp_path)
    assert (shown.exit_code, "autoencoder" in shown.stdout) == (0, True)
    asked_for = five_recipes.invoke("--framework", "torch", "--out", tmp_path)
    assert asked_for.exit_code == 2
    assert "`--framework torch` needs torch, not installed here. From the clone: pip install" in asked_for.stderr


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "PACKAGES", ("numpy", "no_such_package"))
    shown = invoke()
    assert shown.exit_code == 2
    assert "needs no_such_package, not installed here. From the clone: pip install '.[demo,numpy]'." in shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_unscaled_fp16_fails_where_fp32_and_scaled_fp16_learn(seed: int) -> None:
    full, unscaled, static, headroom, dynamic = compared("numpy", steps=800, seed=seed)
    assert full.scores["accuracy"] > 0.95
    assert unscaled.scores["accuracy"] < 0.2
    for scaled in (static, headroom, dynamic):
        assert scaled.scores["accuracy"] > full.scores["accuracy"] - 0.02
        assert np.mean(scaled.losses[-20:]) < 0.1
        assert np.mean(scaled.lost) < 0.05
    assert np.mean(unscaled.lost) > 0.5
    assert (
        unscaled.scores["pixel error"] < 2 * full.scores["pixel error"]
    )  # nothing but the classifier shows that something is wrong
    assert len(dynamic.skipped) > 10
    assert len(static.skipped) == len(headroom.skipped) == 0
