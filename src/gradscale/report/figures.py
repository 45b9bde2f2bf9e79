"""The figures of a report, as the plain dicts that plotly draws. Colors of text and grid are those of the page."""

import html
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.engine.result import Status
from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, get_format
from gradscale.histogram.counts import EXPONENTS
from gradscale.histogram.losses import lost_share

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

Figure = dict[str, Any]
Vector = np.ndarray[Any, Any]

BUCKETS = 1500
"""Buckets of steps of which a line keeps the lowest and the highest point, so that no spike is lost."""

MOST_FRAMES, MOST_LAYERS = 40, 60
COLORS = ("#2a78d6", "#e08a00", "#7a5bd0", "#1a9a6c")
SKIPS = (
    (Status.OVERFLOW, "overflow", "#d03b3b", "x"),
    (Status.NONFINITE_LOSS, "loss inf or NaN", "#b0399c", "diamond"),
)
SHADES = [[0, "#cfe2f8"], [0.5, "#5598e7"], [1, "#0d366b"]]
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
                "name": escaped(run.name),
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
        f"<br>{escaped(one.name)}: {one.kind}{'' if one.count is None else f' ({one.count:,})'}" for one in found[:5]
    ]
    return "".join(listed) + (f"<br>and {len(found) - 5} more" if len(found) > 5 else "")


def heat_map(run: "Run") -> Figure | None:
    """Returns the gradients of each layer by exponent, multiplied by the scale, at each sampled step."""
    sampled = [row for row, tallies in run.watch.items() if any(each.kind == "weight_grad" for each in tallies)]
    if not sampled:
        return None
    rows = [sampled[index] for index in np.unique(np.linspace(0, len(sampled) - 1, MOST_FRAMES).astype(int))]
    names = list(dict.fromkeys(each.name for row in rows for each in run.watch[row] if each.kind == "weight_grad"))
    names = names[:MOST_LAYERS][::-1]
    grids = [_grid(run, row, names) for row in rows]
    used = np.flatnonzero(~np.isnan(np.concatenate(grids)).all(axis=0)) + LOWEST
    left, right = int(min(-25, *used)) - 1, int(max(16, *used)) + 1
    frames = [
        {"name": str(run.step[row]), "data": [{"z": _listed(grid[:, left - LOWEST : right + 1 - LOWEST])}]}
        for row, grid in zip(rows, grids, strict=True)
    ]
    trace = {
        "type": "heatmap",
        "x": list(range(left, right + 1)),
        "text": [[escaped(name)] * (right - left + 1) for name in names],
        "z": frames[-1]["data"][0]["z"],
        "zmin": -6,
        "zmax": 0,
        "colorscale": SHADES,
        "colorbar": {
            "title": {"text": "share"},
            "tickvals": [-6, -3, 0],
            "ticktext": ["1e-6", "1e-3", "1"],
            "thickness": 8,
        },
        "hovertemplate": "%{text}<br>2^%{x}, times the scale: 10^%{z:.1f} of its elements<extra></extra>",
    }
    moves = {"mode": "immediate", "frame": {"duration": 0}}
    steps = [{"method": "animate", "label": one["name"], "args": [[one["name"]], moves]} for one in frames]
    shapes: list[Figure] = []
    labels: list[Figure] = []
    for place, format in enumerate((FP16, FP8_E5M2, FP8_E4M3, BF16)):
        low, high = max(np.log2(format.smallest_subnormal), left - 0.5), min(np.log2(format.max), right + 0.5)
        y = len(names) + 0.4 + 1.1 * place
        bar = {"type": "rect", "x0": low, "x1": high, "y0": y - 0.4, "y1": y + 0.4, "line": {"width": 0}}
        shapes.append(bar | {"fillcolor": COLORS[place], "opacity": 0.8})
        labels.append(
            {
                "x": (low + high) / 2,
                "y": y,
                "text": format.name,
                "showarrow": False,
                "font": {"color": "white", "size": 11},
            }
        )
    for end in (get_format(run.format).smallest_subnormal, get_format(run.format).max):
        line = {"type": "line", "x0": np.log2(end) - 0.5, "x1": np.log2(end) - 0.5, "y0": 0, "y1": 1, "yref": "paper"}
        shapes.append(line | {"line": {"color": COLORS[0], "width": 1.5, "dash": "dot"}})
    layout: Figure = {
        "height": 300 + 20 * len(names),
        "xaxis": {"title": {"text": "log2 of gradient × scale"}, "range": [left - 0.5, right + 0.5]},
        "yaxis": _names(names) | {"range": [-0.5, len(names) + 4.5]},
        "shapes": shapes,
        "annotations": labels,
        "sliders": [{"steps": steps, "active": len(steps) - 1, "currentvalue": {"prefix": "step "}, "pad": {"t": 56}}],
    }
    return {"data": [trace], "layout": layout, "frames": frames}


def _grid(run: "Run", row: int, names: Sequence[str]) -> Vector:
    """Returns log10 of the share of each layer's nonzero elements in each power of two, times the scale."""
    grid = np.zeros((len(names), HIGHEST - LOWEST + 1))
    for each in run.watch[row]:
        if each.kind == "weight_grad" and each.name in names and each.histogram.nonzero:
            at = np.clip(EXPONENTS + int(np.frexp(each.scale)[1]) - 1, LOWEST, HIGHEST) - LOWEST
            np.add.at(grid[names.index(each.name)], at, each.histogram.host_counts / each.histogram.nonzero)
    return np.log10(np.where(grid > 0, grid, np.nan))


def lost_by_layer(run: "Run") -> Figure | None:
    """Returns the share of each layer's gradient elements that the scales of the sampled steps left at zero, if any."""
    losses: dict[str, list[float]] = {}
    for each in (each for tallies in run.watch.values() for each in tallies if each.kind == "weight_grad"):
        losses.setdefault(each.name, []).append(lost_share(each.histogram, run.format, each.scale))
    mean = sorted((float(np.mean(found)), name) for name, found in losses.items() if any(found))[-30:]
    if not mean:
        return None
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [share for share, _ in mean],
        "text": [escaped(name) for _, name in mean],
        "textposition": "none",
        "marker": {"color": COLORS[0]},
        "hovertemplate": "%{text}: %{x:.3%}<extra></extra>",
    }
    axes = {
        "xaxis": {"tickformat": ".2~%", "rangemode": "tozero", "nticks": 6},
        "yaxis": _names([name for _, name in mean]),
    }
    return {"data": [bars], "layout": {"height": 120 + 20 * len(mean), **axes}}


def escaped(name: str) -> str:
    """Returns a name that plotly, which reads tags in its texts, shows as it is."""
    return html.escape(name)


def _names(names: Sequence[str]) -> Figure:
    """Returns an axis that has a name at each whole number, without what all of them begin with, cut in the middle."""
    start = commonprefix(names).rfind(".") + 1 if len(names) > 1 else 0
    short = [name if len(name) <= 22 else f"{name[:5]}…{name[-16:]}" for name in (name[start:] for name in names)]
    return {"tickvals": list(range(len(names))), "ticktext": list(map(escaped, short)), "automargin": True}


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
    return np.where(np.isfinite(values), values.astype(object), None).tolist()
