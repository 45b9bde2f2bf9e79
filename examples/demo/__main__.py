"""`python -m examples.demo`: trains small networks in FP16 and FP8, with and without loss scaling.

With torch, a deep CNN reads digits, and a small GPT learns the next character of Python's own source code and, at a
small weight, the one after. With jax, the GPT alone. With keras, mxnet and numpy, an autoencoder redraws digits and, at
a small weight, names them; KERAS_BACKEND chooses the backend of keras.

Small gradients become zero without any error. A scale brings them back. A scale that is too high overflows: the step is
skipped and the scale halves. FP16 is the machine's own; FP8 is emulated, with torch only.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.demo import FRAMEWORKS, load_demo
from examples.demo.loop import OTHER_SEEDS, Demo, compare
from examples.demo.runs import Comparison
from examples.demo.show import make_table, save_plot, verdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradscale.record import plain
from gradscale.recording.reader import read_run
from gradscale.recording.writer import FLUSH_S
from gradscale.report.page import report

RECORDED = "FP16 Dynamic"
"""The recipe whose runs are recorded: it skips steps."""

PACKAGES = ("sklearn", "matplotlib", "threadpoolctl", "plotly")
"""What every framework's demo needs: the extra `demo`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and shows a table, a verdict and a plot."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", help=f"{', '.join(FRAMEWORKS)}: by default the first that is installed")
    parser.add_argument("--model", default="all", help="which model to train: cnn or gpt, with torch")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and the batches")
    parser.add_argument("--steps", type=int, help="that each run trains for, instead of what the model needs")
    parser.add_argument("--out", type=Path, default=Path("gradscale-demo.png"), help="a .png or .svg file, or a folder")
    parser.add_argument("--json", action="store_true", help="print the ends of the runs as JSON")
    options = parser.parse_args(arguments)
    try:
        demo, plan, path = _plan(options)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    screen = Console(highlight=False)
    if not options.json:
        screen.print(announcement(demo, plan))
    with TemporaryDirectory() as folder:
        comparisons = train(recorded(demo, folder), plan, options.seed, screen, hidden=options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        reported = save_report(folder, path)
    save_plot(comparisons, path)
    if options.json:
        print(json.dumps({"plot": str(path), "models": [_as_json(comparison) for comparison in comparisons]}))
        return
    for comparison in comparisons:
        screen.print(make_table(comparison))
        screen.print(f"[bold]{comparison.subject.model}[/bold]: {verdict(comparison)}\n")
    screen.print(f"plot: {path}", soft_wrap=True)
    if reported:
        screen.print(f"report of the runs {RECORDED}, to open in a browser: {reported}", soft_wrap=True)


def recorded(demo: Demo, folder: str) -> Demo:
    """Returns the demo with one of its runs recorded in a folder, as far as its framework does."""
    path = str(Path(folder) / "{model}.jsonl")
    return replace(demo, recipes=[replace(one, record=path) if one.name == RECORDED else one for one in demo.recipes])


def save_report(folder: str, plot: Path) -> Path | None:
    """Writes the report of the runs that were recorded, beside the plot. Returns its path, or None without a run."""
    paths = sorted(Path(folder).glob("*.jsonl"))
    if not paths:
        return None
    time.sleep(2 * FLUSH_S)  # the last lines are on their way to the file
    runs = [replace(read_run(path), name=f"{path.stem}, {RECORDED}") for path in paths]
    out = plot.with_name(f"{plot.stem}-report.html")
    out.write_text(report(runs), encoding="utf-8")
    return out


def _plan(options: argparse.Namespace) -> tuple[Demo, dict[str, int], Path]:
    """Returns the demo, the steps of each model, and the file of the plot, that the command line asks for.

    Raises:
        ValueError: an option has no such value.
        ImportError: what the framework needs is not installed.
    """
    for name, lowest in (("seed", 0), ("steps", 1)):
        if (value := getattr(options, name)) is not None and value < lowest:
            raise ValueError(f"`--{name}` must be at least {lowest}. Received: {value}.")
    framework = options.framework or next(known for known, needed in FRAMEWORKS.items() if not _missing(*needed))
    if framework not in FRAMEWORKS:
        raise ValueError(f"`--framework` must be one of {', '.join(FRAMEWORKS)}. Received: {framework!r}.")
    if missing := _missing(*FRAMEWORKS[framework], *PACKAGES):
        raise ImportError(
            f"`--framework {framework}` needs {', '.join(missing)}, not installed here. "
            f"From the clone: pip install '.[demo,{framework}]'."
        )
    demo = load_demo(framework)
    if options.model not in ("all", *demo.steps):
        raise ValueError(f"`--model` must be one of all, {', '.join(demo.steps)}. Received: {options.model!r}.")
    chosen = demo.steps if options.model == "all" else [options.model]
    return demo, {model: options.steps or demo.steps[model] for model in chosen}, plot_path(options.out)


def _missing(*packages: str) -> list[str]:
    """Returns those of the packages that are not installed. Imports nothing."""
    return [package for package in packages if find_spec(package) is None]


def plot_path(out: Path) -> Path:
    """Returns the file to write. Leaves the disk as it was."""
    out = out.expanduser()
    is_file = out.suffix.lower() in (".png", ".svg") and not out.is_dir()
    if (out.suffix or out.exists()) and not is_file and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, or a file that ends in .png or .svg. Received: {out}.")
    path = out if is_file else out / "demo.png"
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"`--out` must be in a folder, and {parent} is a file. Received: {out}.")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise ValueError(f"`--out` must be writable. Received: {out}.")
    return path


def announcement(demo: Demo, plan: Mapping[str, int]) -> str:
    """Returns what is trained, and about how long it takes."""
    models = " and ".join(f"{name} ({steps:,} {'step' if steps == 1 else 'steps'})" for name, steps in plan.items())
    seconds = max(5, 5 * round(demo.seconds(plan) / 5))
    return (
        f"Training {models} {len(demo.recipes)} ways, and FP32 with {len(OTHER_SEEDS)} more seeds.\n"
        f"This takes about {seconds} seconds on two CPU cores."
    )


def train(demo: Demo, plan: Mapping[str, int], seed: int, screen: Console, *, hidden: bool) -> list[Comparison]:
    """Returns the comparisons. Shows a bar for each run while it trains, unless `hidden`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, disable=hidden) as progress:
        bars = {
            (model, run): progress.add_task(f"{model} {run}", total=steps, start=False)
            for (model, run), steps in demo.runs(plan).items()
        }

        def tick(model: str, run: str) -> None:
            progress.start_task(bars[model, run])
            progress.advance(bars[model, run])

        return compare(demo, plan, seed, tick)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the ends of the runs, and the verdict."""
    runs = [
        {
            "run": run.recipe,
            "scores": run.scores,
            "loss": plain(run.final_loss()),
            "lost": plain(run.share_lost()),
            "skipped": run.skipped,
            "final_scale": run.scales[-1],
        }
        for run in comparison.runs
    ]
    return {
        "model": comparison.subject.model,
        "runs": runs,
        "untrained": comparison.untrained,
        "other_seeds": comparison.other_seeds,
        "verdict": verdict(comparison),
    }


if __name__ == "__main__":
    main()
