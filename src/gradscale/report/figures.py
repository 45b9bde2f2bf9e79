"""The figures of a report, as plain dicts. Names in plotly's texts, which may hold tags, are escaped."""

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.engine.result import Status
from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format, get_format
from gradscale.histogram.counts import EXPONENTS
from gradscale.histogram.losses import lost_share

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

Figure = dict[str, Any]
Vector = np.ndarray[Any, Any]

BUCKETS = 1500
"""Buckets of steps of which a line keeps the lowest and the highest point, so that no spike is lost."""

MOST_FRAMES, MOST_LAYERS, MOST_BARS = 40, 60, 30
COLORS = ("#2a78d6", "#e08a00", "#7a5bd0", "#1a9a6c")
SKIPS = (
    (Status.OVERFLOW, "overflow", "#d03b3b", "x"),
    (Status.NONFINITE_LOSS, "loss inf or NaN", "#b0399c", "diamond"),
)
LOWEST, HIGHEST = -150, 140
"""Exponents of scaled gradients; what is beyond counts at the ends."""


def thinned(values: Vector, buckets: int = BUCKETS) -> Vector:
    """Returns the rows of a line to draw: where there are many, the lowest and the highest known of each bucket."""
    if len(values) <= 2 * buckets:
        return np.arange(len(values))
    rows = np.flatnonzero(np.isfinite(values))
    parts = [part for part in np.array_split(rows, buckets) if part.size]
    ends = [part[end] for part in parts for end in (values[part].argmin(), values[part].argmax())]
    return np.unique([*ends, *rows[:1], *rows[-1:]]).astype(int)


def timeline(runs: "Sequence[Run]") -> Figure:
    """Returns scale, loss and norm of runs over the steps, with their skips on the line of the scale."""
    columns = {
        "scale": [run.scale for run in runs],
        "loss": [run.loss for run in runs],
        "norm": [run.norm for run in runs],
    }
    shown = {title: found for title, found in columns.items() if any(np.isfinite(each).any() for each in found)}
    layout: Figure = {
        "height": 180 + 150 * len(shown),
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": "step"}, "anchor": _axis(len(shown) - 1)},
    }
    data: list[Figure] = []
    for place, (title, found) in enumerate(shown.items()):
        top = 1 - place / len(shown)
        positive = all((each[np.isfinite(each)] > 0).all() for each in found)
        layout[_axis(place).replace("y", "yaxis")] = {
            "domain": [max(0.0, top - 1 / len(shown) + 0.05), top],
            "title": {"text": title},
            **({"type": "log", **_ticks(found, 2 if title == "scale" else 10)} if positive else {"nticks": 5}),
        }
        for index, (run, values) in enumerate(zip(runs, found, strict=True)):
            line = {"color": COLORS[index % len(COLORS)], "width": 1.5, "shape": "hv" if title == "scale" else "linear"}
            more = {
                "line": line,
                "showlegend": len(runs) > 1 and not place,
                "legendgroup": index,
                "name": html.escape(run.name),
            }
            data.append(
                _points(run, thinned(values), values, place)
                | more
                | {"hovertemplate": f"step %{{x}}: {title} %{{y:.5g}}<extra></extra>"}
            )
        if title == "scale":
            data += [points for run in runs for points in _skips(run)]
    return {"data": data, "layout": layout}


def _skips(run: "Run") -> Iterable[Figure]:
    """Yields the skipped steps as points, by their status; where there are many, the first of each bucket."""
    for status, title, color, symbol in SKIPS:
        rows = np.flatnonzero(run.status == status.value)
        parts = np.array_split(rows, min(BUCKETS, max(1, rows.size)))
        if rows.size:
            more = [
                f"<br>and {part.size - 1} more up to step {run.step[part[-1]]}" if part.size > 1 else ""
                for part in parts
            ]
            yield _points(run, np.array([part[0] for part in parts]), run.scale, 0) | {
                "mode": "markers",
                "name": f"{title} ({rows.size:,})",
                "marker": {"color": color, "symbol": symbol, "size": 8},
                "text": [
                    f"{title}{_culprits(run, int(part[0]))}{rest}" for part, rest in zip(parts, more, strict=True)
                ],
                "hovertemplate": "step %{x}, scale %{y:.6g}<br>%{text}<extra></extra>",
            }


def _culprits(run: "Run", row: int) -> str:
    found = run.culprits.get(row, ())
    listed = [
        f"<br>{html.escape(one.name)}: {one.kind}{'' if one.count is None else f' ({one.count:,})'}"
        for one in found[:5]
    ]
    return "".join(listed) + (f"<br>and {len(found) - 5} more" if len(found) > 5 else "")


def heat_map(run: "Run") -> Figure | None:
    """Returns the gradients of each layer by exponent, times the scale, at sampled steps, for the page to draw.

    `z` is log10 of the share of a layer's nonzero elements: by step, layer and exponent in `x`.
    """
    sampled = [row for row, tallies in run.watch.items() if any(each.kind == "weight_grad" for each in tallies)]
    if not sampled:
        return None
    rows = [sampled[index] for index in np.unique(np.linspace(0, len(sampled) - 1, MOST_FRAMES).astype(int))]
    names = list(dict.fromkeys(each.name for row in rows for each in run.watch[row] if each.kind == "weight_grad"))
    names = names[:MOST_LAYERS][::-1]
    grids = np.zeros((len(rows), len(names), HIGHEST - LOWEST + 1))
    for grid, row in zip(grids, rows, strict=True):
        for each in run.watch[row]:
            if each.kind == "weight_grad" and each.name in names and each.histogram.nonzero:
                at = np.clip(EXPONENTS + int(np.frexp(each.scale)[1]) - 1, LOWEST, HIGHEST) - LOWEST
                np.add.at(grid[names.index(each.name)], at, each.histogram.host_counts / each.histogram.nonzero)
    used = np.flatnonzero(grids.any(axis=(0, 1))) + LOWEST
    left, right = int(min([-25, *used])) - 1, int(max([16, *used])) + 1
    shares = grids[:, :, left - LOWEST : right + 1 - LOWEST]
    return {
        "heat": True,
        "x": list(range(left, right + 1)),
        "z": _listed(np.log10(np.where(shares > 0, shares, np.nan))),
        "names": names,
        "steps": run.step[rows].tolist(),
        "ranges": [[each.name, *_log2_range(each)] for each in (FP16, FP8_E5M2, FP8_E4M3, BF16)],
        "ends": _log2_range(get_format(run.format)),
    }


def _log2_range(format: Format) -> list[float]:
    return [float(np.log2(format.smallest_subnormal)), float(np.log2(format.max))]


def lost_by_layer(run: "Run") -> Figure | None:
    """Returns the share of each layer's gradient elements that the scales of the sampled steps left at zero, if any."""
    losses: dict[str, list[float]] = {}
    for each in (each for tallies in run.watch.values() for each in tallies if each.kind == "weight_grad"):
        losses.setdefault(each.name, []).append(lost_share(each.histogram, run.format, each.scale))
    mean = sorted((float(np.mean(found)), name) for name, found in losses.items() if any(found))[-MOST_BARS:]
    return {"x": [share for share, _ in mean], "names": [name for _, name in mean]} if mean else None


def _ticks(columns: Sequence[Vector], base: int) -> Figure:
    """Returns about six ticks of a logarithmic axis: powers of two, or 1, 2 and 5 times powers of ten."""
    values = np.concatenate([each[np.isfinite(each)] for each in columns])
    low, high = int(np.floor(np.log(values.min()) / np.log(base))), int(np.ceil(np.log(values.max()) / np.log(base)))
    powers = range(low, high + 1, max(1, round((high - low) / 6)))
    if base == 2:
        return {"tickvals": [2.0**each for each in powers], "ticktext": [f"2<sup>{each}</sup>" for each in powers]}
    ticks = [digit * 10.0**each for each in powers for digit in ((1, 2, 5) if high - low < 4 else (1,))]
    return {"tickvals": ticks, "ticktext": [f"{each:g}" for each in ticks]}


def _axis(place: int) -> str:
    return f"y{place + 1}" if place else "y"


def _points(run: "Run", rows: Vector, values: Vector, place: int) -> Figure:
    xy = {"x": run.step[rows].tolist(), "y": _listed(values[rows]), "xaxis": "x", "yaxis": _axis(place)}
    return {"type": "scatter", "mode": "lines", **xy}


def _listed(values: Vector) -> Any:
    """Returns numbers for JSON, which has none for what is not known."""
    listed = values.astype(object)
    listed[~np.isfinite(values)] = None
    return listed.tolist()
