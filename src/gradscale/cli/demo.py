"""`gradscale demo`: trains small networks in FP16 and FP8, with and without loss scaling."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradscale._extras import installed, require
from gradscale.cli._console import chosen_models, console, counted, usage_errors
from gradscale.demo import FRAMEWORKS, Comparison, Demo, compare, load_demo
from gradscale.demo.extra import check_extra
from gradscale.demo.plot import save_plot
from gradscale.demo.table import final_loss, make_table
from gradscale.demo.train import OTHER_SEEDS
from gradscale.demo.verdict import verdict
from gradscale.record import plain

ENDINGS = (".png", ".svg")


def demo(
    framework: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FRAMEWORKS)}: by default the first that is installed."),
    ] = None,
    model: Annotated[str, typer.Option(help="Which model to train: cnn or gpt, with torch.")] = "all",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split, the start and the batches.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps that each run trains for, instead of what the model needs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the plot goes: a .png or .svg file, or a folder.")] = Path(
        "gradscale-demo.png"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the ends of the runs as JSON.")] = False,
) -> None:
    """Train networks in FP16 and FP8 with and without loss scaling; show a table, a verdict and a plot.

    With torch, a deep CNN reads digits, and a small GPT learns the next
    character of Python's own source code and, at a small weight, the one after.
    With jax, the GPT alone. With keras, mxnet and numpy, an autoencoder redraws
    digits and, at a small weight, names them; KERAS_BACKEND chooses the
    backend of keras.
    Small gradients become zero without any error. A scale brings them back.
    A scale that is too high overflows: the step is skipped and the scale halves.
    FP16 is the machine's own; FP8 is emulated, with torch only.
    """
    with usage_errors():
        check_extra()
        shown = _load(framework)
        plan = {chosen: steps or shown.steps[chosen] for chosen in chosen_models(model, shown.steps)}
        path = _plot_path(out)
    screen = console()
    if not as_json:
        screen.print(_announcement(shown, plan))
    comparisons = _train(shown, plan, seed, hidden=as_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plot(comparisons, path)
    if as_json:
        print(json.dumps({"plot": str(path), "models": [_as_json(comparison) for comparison in comparisons]}))
        return
    for comparison in comparisons:
        screen.print(make_table(comparison))
        screen.print(f"[bold]{comparison.subject.model}[/bold]: {verdict(comparison)}\n")
    screen.print(f"plot: {path}", soft_wrap=True)


def _announcement(shown: Demo, plan: Mapping[str, int]) -> str:
    """Returns what is trained, and about how long it takes."""
    models = " and ".join(f"{name} ({counted(steps, 'step')})" for name, steps in plan.items())
    seconds = max(5, 5 * round(shown.seconds(plan) / 5))
    return (
        f"Training {models} {len(shown.recipes)} ways, and FP32 with {len(OTHER_SEEDS)} more seeds.\n"
        f"This takes about {seconds} seconds on two CPU cores."
    )


def _as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the ends of the runs, and the verdict."""
    runs = [
        {
            "run": run.recipe,
            "scores": run.scores,
            "loss": plain(final_loss(run)),
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


def _load(framework: str | None) -> Demo:
    """Returns the demo of the chosen framework, or of the first that is installed."""
    if framework is None:
        framework = next(known for known in FRAMEWORKS if _is_installed(known))
    if framework not in FRAMEWORKS:
        raise ValueError(f"`--framework` must be one of {', '.join(FRAMEWORKS)}. Received: {framework!r}.")
    require(f"`--framework {framework}`", *FRAMEWORKS[framework], extra=framework)
    return load_demo(framework)


def _is_installed(framework: str) -> bool:
    """Returns whether the packages of a framework's demo are installed. Imports nothing."""
    return all(installed(package) for package in FRAMEWORKS[framework])


def _plot_path(out: Path) -> Path:
    """Returns the file to write, which can be made and opened. Leaves the disk as it was."""
    out = out.expanduser()
    is_file = out.suffix.lower() in ENDINGS and not out.is_dir()
    if (out.suffix or out.exists()) and not is_file and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, or a file that ends in .png or .svg. Received: {out}.")
    path = out if is_file else out / "demo.png"
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    parent = path.absolute().parents[len(missing)]
    if not parent.is_dir():
        raise ValueError(f"`--out` must be in a folder, and {parent} is a file. Received: {out}.")
    try:
        _check_writable(path, missing)
    except OSError as error:
        raise ValueError(f"`--out` must be writable. Received: {out}. {error.strerror}.") from error
    return path


def _check_writable(path: Path, missing: Sequence[Path]) -> None:
    """Raises `OSError` unless the file can be made in its folders, of which these are `missing`, innermost first."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    finally:
        # Training takes a while: one that is interrupted should not leave an empty file.
        if not existed:
            path.unlink(missing_ok=True)
        for folder in missing:
            if folder.is_dir():
                folder.rmdir()


def _train(shown: Demo, plan: Mapping[str, int], seed: int, *, hidden: bool) -> list[Comparison]:
    """Returns the comparisons. Shows a bar for each run while it trains, unless `hidden`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), disable=hidden) as progress:
        bars = {
            (model, run): progress.add_task(f"{model} {run}", total=steps, start=False)
            for (model, run), steps in shown.runs(plan).items()
        }

        def tick(model: str, run: str) -> None:
            progress.start_task(bars[model, run])
            progress.advance(bars[model, run])

        return compare(shown, plan, seed, tick)
