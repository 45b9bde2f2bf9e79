"""`gradscale demo`: trains a small network in FP16, with and without loss scaling."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradscale.cli._border import console, fail, mistakes_told
from gradscale.demo import WAYS, Run, compare
from gradscale.demo.digits import load_digits
from gradscale.demo.extra import MissingExtra, check_extra
from gradscale.demo.plot import save_plot
from gradscale.demo.table import make_table

PICTURES = (".png", ".svg")


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split, the start and the batches.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps that each run trains for.")] = 800,
    out: Annotated[Path, typer.Option(help="Where the picture goes: a .png or .svg file, or a folder.")] = Path(
        "gradscale-demo.png"
    ),
) -> None:
    """Train a network in FP16 with and without loss scaling; show a table and draw a picture.

    It learns to redraw handwritten digits and, at a small weight, to name them.
    In FP16 the gradients of that small loss become zero, and nothing tells:
    the drawings are fine, the names are guesses. A scale brings them back.
    """
    try:
        check_extra()
    except MissingExtra as error:
        fail(str(error))
    with mistakes_told():
        path = _picture_path(out)
    runs = _train(seed, steps)
    save_plot(runs, path)
    screen = console()
    screen.print(make_table(runs))
    screen.print(f"picture: {path}", soft_wrap=True)


def _picture_path(out: Path) -> Path:
    """Returns the file to write, in a folder that exists and can be written to."""
    is_file = out.suffix in PICTURES and not out.is_dir()
    if out.suffix and not is_file and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, or a file that ends in .png or .svg. Received: {out}.")
    path = out if is_file else out / "demo.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"`--out` must be writable. Received: {out}.")
    return path


def _train(seed: int, steps: int) -> list[Run]:
    """Returns the four runs. Shows a bar for each while they train."""
    columns = (TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console()) as progress:
        bars = {way: progress.add_task(way, total=steps, start=False) for way in WAYS}

        def tick(way: str) -> None:
            progress.start_task(bars[way])
            progress.advance(bars[way])

        return list(compare(load_digits(seed), seed, steps, tick))
