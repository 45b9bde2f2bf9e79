"""`gradscale demo`: trains small networks in FP16 and FP8, with and without loss scaling."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradscale.cli._console import chosen_models, console, usage_errors
from gradscale.demo import FRAMEWORKS, Comparison, Demo, compare, load_demo
from gradscale.demo.extra import check_extra
from gradscale.demo.plot import save_plot
from gradscale.demo.table import make_table

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
) -> None:
    """Train networks in FP16 and FP8 with and without loss scaling; show a table and draw a plot.

    With torch, a deep CNN reads digits, and a small GPT learns the next
    character of Python's own source code and, at a small weight, the one after.
    With jax, the GPT alone. With keras, mxnet and numpy, an autoencoder redraws
    digits and, at a small weight, names them; KERAS_BACKEND chooses the
    backend of keras.
    Small gradients become zero without any error. A scale brings them back.
    FP16 is the machine's own; FP8 is emulated, with torch only.
    """
    with usage_errors():
        check_extra()
        path = _plot_path(out)
        shown = _load(framework)
        plan = {chosen: steps or shown.steps[chosen] for chosen in chosen_models(model, shown.steps)}
    comparisons = _train(shown, plan, seed)
    save_plot(comparisons, path)
    screen = console()
    for comparison in comparisons:
        screen.print(make_table(comparison))
    screen.print(f"plot: {path}", soft_wrap=True)


def _load(framework: str | None) -> Demo:
    """Returns the demo of the chosen framework, or of the first that is installed."""
    if framework is None:
        framework = next(known for known in FRAMEWORKS if _is_installed(known))
    if framework not in FRAMEWORKS:
        raise ValueError(f"`--framework` must be one of {', '.join(FRAMEWORKS)}. Received: {framework}.")
    if not _is_installed(framework):
        raise ValueError(
            f'`--framework` must be installed: pip install "gradscale[{framework}]". Received: {framework}.'
        )
    return load_demo(framework)


def _is_installed(framework: str) -> bool:
    """Returns whether the packages of a framework's demo are installed. Imports nothing."""
    return all(find_spec(package) for package in FRAMEWORKS[framework])


def _plot_path(out: Path) -> Path:
    """Returns the file to write, in a folder that exists and can be written to."""
    is_file = out.suffix in ENDINGS and not out.is_dir()
    if out.suffix and not is_file and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, or a file that ends in .png or .svg. Received: {out}.")
    path = out if is_file else out / "demo.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"`--out` must be writable. Received: {out}.")
    return path


def _train(shown: Demo, plan: Mapping[str, int], seed: int) -> list[Comparison]:
    """Returns the comparisons. Shows a bar for each run while it trains."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console()) as progress:
        bars = {
            (model, recipe.name): progress.add_task(f"{model} {recipe.name}", total=steps, start=False)
            for model, steps in plan.items()
            for recipe in shown.recipes
        }

        def tick(model: str, recipe: str) -> None:
            progress.start_task(bars[model, recipe])
            progress.advance(bars[model, recipe])

        return compare(shown, plan, seed, tick)
