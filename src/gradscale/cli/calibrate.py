"""`gradscale calibrate`: the best static scale of a PyTorch model, and the layers that it does not serve."""

import json
import math
from collections.abc import Generator, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradscale._extras import require
from gradscale.cli._console import console, counted, fail, number, table, usage_errors
from gradscale.formats import get_format
from gradscale.histogram.calibration import LEGEND, Calibration
from gradscale.record import plain

ENDINGS = (".png", ".svg")

OUTCOMES = (
    ("overflow", "overflow", "#d55e00"),
    ("flushed", "become zero", "#404040"),
    ("subnormal", "keep fewer digits", "#e69f00"),
)
"""What may become of gradients, in the plot: the share, its label and its color. The rest is kept."""


def calibrate(
    factory: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION; the function returns a model, batches, a function of both that returns the loss, "
            "and, if the model should be trained meanwhile, an optimizer.",
            show_default=False,
        ),
    ],
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure, at most.")] = 50,
    format: Annotated[str, typer.Option(help="Format that gradients are to be computed in.")] = "FP16",
    margin_bits: Annotated[
        float, typer.Option(min=0, help="How many times gradients may double before they overflow.")
    ] = 2,
    layers: Annotated[int, typer.Option(min=0, help="Gradients to show, those that lose most first.")] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the losses at each scale: a .png or .svg file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every gradient.")] = False,
) -> None:
    """Find the best static scale of a PyTorch model, in float32 on any machine.

    Example: gradscale calibrate my_package.training:parts --batches 100
    """
    with usage_errors():
        require("`gradscale calibrate`", "torch", extra="torch")
        get_format(format)
        if plot is not None:
            _check_plot(plot)
    found = _calibrated(factory, batches, format, margin_bits, hidden=as_json)
    if plot is not None:
        _draw(found, plot)
    if as_json:
        print(json.dumps(plain(found.to_dict())))
    else:
        _show(found, layers, plot)


class UsersError(Exception):
    """Carries an error of the user's own functions past `usage_errors`, so that it keeps its traceback."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@contextmanager
def _users_code() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise UsersError(error) from error


def _calibrated(factory: str, most: int, format: str, margin_bits: float, *, hidden: bool) -> Calibration:
    from gradscale.checkup.targets import BadTarget, load_training
    from gradscale.torch import calibrate as run

    try:
        model, data, loss_fn, optimizer = load_training("FACTORY", factory)
    except BadTarget as error:
        fail(str(error))

    def batches() -> Generator[Any]:
        with _users_code():
            yield from islice(data, most)

    def loss(model: Any, batch: Any) -> Any:
        with _users_code():
            return loss_fn(model, batch)

    columns = (TextColumn("batches"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with usage_errors(), Progress(*columns, console=console(), disable=hidden) as progress:
        bar = progress.add_task("batches", total=min(most, len(data)) if isinstance(data, Sized) else most)
        settings: dict[str, Any] = {"margin_bits": margin_bits, "optimizer": optimizer}
        try:
            return run(model, batches(), loss, format, **settings, tick=lambda: progress.advance(bar))
        except UsersError as carried:
            error = carried.error
    raise error


def _show(found: Calibration, most: int, plot: Path | None) -> None:
    screen = console()
    screen.print(f"[bold]{found.answer}[/bold]")
    screen.print(
        f"{found.format.name}: best static scale {number(found.scale)}, {counted(found.safe_bits, 'bit')} safe"
    )
    scales = table("scale", "flushed", "subnormal", "overflow", "energy", "SNR dB")
    for each in found.shown:
        shares = (each.losses.flushed, each.losses.subnormal, each.losses.overflow, each.losses.flushed_energy)
        best = " best" if each.scale == found.scale else ""
        scales.add_row(_power(each.scale) + best, *(f"{share:.2%}" for share in shares), f"{each.losses.snr_db:.1f}")
    gradients = table("gradient of", "own", "bits", "flushed", "subnormal", "advice", prose=1)
    for layer in found.layers[:most]:
        own = "" if layer.own_scale is None else _power(layer.own_scale)
        shares = (f"{layer.losses.flushed:.2%}", f"{layer.losses.subnormal:.2%}")
        gradients.add_row(escape(layer.name), own, str(layer.range_bits), *shares, layer.advice)
    screen.print(scales, gradients)
    if len(found.layers) > most:
        rest = counted(len(found.layers) - most, "gradient")
        screen.print(f"{rest} not shown; --layers {len(found.layers)} shows all.")
    screen.print(LEGEND)
    if plot is not None:
        screen.print(f"plot: {plot}", soft_wrap=True)


def _power(scale: float) -> str:
    return f"2^{math.frexp(scale)[1] - 1}"


def _check_plot(path: Path) -> None:
    require("`--plot`", "matplotlib", extra="demo")
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"`--plot` must be a file that ends in .png or .svg. Received: {path}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`--plot` must be in a folder that exists. Received: {path}.")


def _draw(found: Calibration, path: Path) -> None:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    listed = [each for each in found.at if each.scale >= min(1.0, found.scale)]
    powers = [math.log2(each.scale) for each in listed]
    shares = [[100 * getattr(each.losses, name) for each in listed] for name, _, _ in OUTCOMES]
    kept = [100 - sum(each) for each in zip(*shares, strict=True)]
    axes.stackplot(
        powers,
        *shares,
        kept,
        labels=[*(label for _, label, _ in OUTCOMES), "kept"],
        colors=[*(each[2] for each in OUTCOMES), "#cfe8dc"],
    )
    for scale, text in ((1.0, "no scale"), (found.scale, "best static scale")):
        axes.axvline(math.log2(scale), color="black", linewidth=1, linestyle="--")
        axes.annotate(
            f" {text}",
            (math.log2(scale), 50),
            rotation=90,
            ha="left" if scale == listed[0].scale else "right",
            va="center",
        )
    axes.set_xticks(powers[::2], [f"$2^{{{power:.0f}}}$" for power in powers[::2]])
    axes.set(xlabel="loss scale", ylabel="share of nonzero gradients (%)", ylim=(0, 100), xlim=(powers[0], powers[-1]))
    axes.set_title(f"What becomes of gradients in {found.format.name}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
