"""What holds for the five recipes in the demo of every framework with one model."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples.demo import __main__, load_demo, loop
from examples.demo.loop import compare
from examples.demo.runs import Run

from gradscale.histogram import best_static_scale, overflow_share

RECIPES = ("FP32", "FP16 unscaled", "FP16 Static", "FP16 Headroom", "FP16 Dynamic")


class Shown(NamedTuple):
    """What the program printed, and its exit code."""

    exit_code: Any
    stdout: str
    stderr: str


def invoke(*arguments: Any) -> Shown:
    """Runs `python -m examples.demo` with arguments."""
    code: Any = 0
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        try:
            __main__.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
    return Shown(code, stdout.getvalue(), stderr.getvalue())


def compared(framework: str, steps: int, seed: int = 0) -> list[Run]:
    """Returns the runs of a demo with one model, whose gradients are compared with FP32's at every step."""
    demo = load_demo(framework)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAMPLE_EVERY", 1)
        (comparison,) = compare(demo, dict.fromkeys(demo.steps, steps), seed, lambda model, recipe: None)
    return list(comparison.runs)


class FiveRecipes:
    """Tests to inherit.

    Attributes:
        framework: whose demo it is.
        model: the name of its model.
        score: what its table shows.
        lost: share of gradients that unscaled FP16 loses at least.
        steps: of the runs that are examined.
    """

    framework: str
    model: str
    score: str
    lost: float
    steps = 3

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls) -> list[Run]:
        return compared(cls.framework, cls.steps)

    def test_the_five_recipes_are_run_in_order(self, runs: list[Run]) -> None:
        assert tuple(load_demo(self.framework).steps) == (self.model,)
        assert tuple(run.recipe for run in runs) == RECIPES
        assert all(len(run.losses) == len(run.scales) == self.steps for run in runs)

    def test_every_recipe_starts_from_the_same_weights_and_batches(self, runs: list[Run]) -> None:
        full, *halves = (run.losses[0] for run in runs)
        assert halves == [halves[0]] * 4
        assert full != halves[0]
        assert full == pytest.approx(halves[0], rel=1e-3)

    def test_the_static_scale_comes_from_the_gradients_of_the_fp32_run(self, runs: list[Run]) -> None:
        full, _, static, *_ = runs
        assert set(static.scales) == {best_static_scale(full.histogram)}
        assert overflow_share(full.histogram, scale=static.scales[0]) == 0.0

    def test_a_seed_gives_the_same_run_again_and_another_gives_another(self, runs: list[Run]) -> None:
        again, other = compared(self.framework, 1)[3], compared(self.framework, 1, seed=1)[3]
        assert (again.losses, again.lost) == (runs[3].losses[:1], runs[3].lost[:1])
        assert other.losses != again.losses

    def test_a_scale_that_starts_too_high_overflows_and_halves(self, runs: list[Run]) -> None:
        dynamic = runs[4]
        assert dynamic.skipped == list(range(self.steps))
        assert dynamic.scales == [2.0 ** (32 - step) for step in range(self.steps)]

    def test_only_unscaled_fp16_loses_gradients(self, runs: list[Run]) -> None:
        full, unscaled, static, headroom, dynamic = runs
        assert set(full.lost) == {0.0}
        assert min(unscaled.lost) > self.lost
        first, second, *later = headroom.lost
        assert first < unscaled.lost[0]  # of the same gradients, at a scale of 16
        assert max(static.lost + later + dynamic.lost) < 0.01
        # The second is 4 bits below what fits. Of the gradients near zero, each bit loses about twice as many.
        lowered = headroom.scales[2] / headroom.scales[1]
        assert lowered == 16
        assert second < lowered * max(*static.lost, *later, 1e-4)

    def test_the_command_trains_and_writes_the_plot(self, tmp_path: Path) -> None:
        plot = tmp_path / "plot.png"
        shown = invoke("--framework", self.framework, "--steps", 1, "--out", plot)
        assert shown.exit_code == 0, shown.stderr
        assert self.score in shown.stdout
        assert plot.stat().st_size > 1000
