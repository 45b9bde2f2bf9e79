"""The figures of a report, as the plain dicts that plotly draws. Colors of text and grid are those of the page."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.engine.result import Status
from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, get_format
from gradscale.histogram.counts import EXPONENTS
from gradscale.histogram.losses import lost_share
from gradscale.watching.sample import Tally

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

Figure = dict[str, Any]
Vector = np.ndarray[Any, Any]

BUCKETS = 1500
"""Points that a line keeps twice: the lowest and the highest of each bucket of steps, so that no spike is lost."""

MOST_FRAMES, MOST_LAYERS = 40, 60
COLORS = ("#2a78d6", "#e08a00", "#7a5bd0", "#1a9a6c")
SKIPS = {
    Status.OVERFLOW.value: ("overflow", "#d03b3b", "x"),
    Status.NONFINITE_LOSS.value: ("loss inf or NaN", "#b0399c", "diamond"),
}
SHADES = [[0, "#dbe9f9"], [0.5, "#5598e7"], [1, "#0d366b"]]
RANGES = (FP16, FP8_E5M2, FP8_E4M3, BF16)


def thinned(values: Vector, buckets: int = BUCKETS) -> Vector:
    """Returns the rows of a line to draw: where there are many, the lowest and the highest known of each bucket."""
    rows = np.flatnonzero(~np.isnan(values))
    if rows.size <= 2 * buckets:
        return rows
    parts = np.array_split(rows, buckets)
    ends = {int(part[0]) for part in parts[:1]} | {int(parts[-1][-1])}
    return np.array(sorted(ends.union(*({int(p[values[p].argmin()]), int(p[values[p].argmax()])} for p in parts))))


def timeline(runs: "Sequence[Run]") -> Figure:
    """Returns scale, loss and norm of runs over the steps, with their skips on the line of the scale."""
    panels = [("scale", lambda run: run.scale), ("loss", lambda run: run.loss), ("norm", lambda run: run.norm)]
    shown = [each for each in panels if any(np.isfinite(each[1](run)).any() for run in runs)]
    height = 1 / max(1, len(shown))
    layout: Figure = {
        "height": 180 + 150 * len(shown),
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": "step"}, "anchor": f"y{len(shown)}" if len(shown) > 1 else "y"},
    }
    data: list[Figure] = []
    for place, (title, column) in enumerate(shown):
        axis = f"y{place + 1}" if place else "y"
        top = 1 - place * height
        several = all((column(run)[np.isfinite(column(run))] > 0).all() for run in runs)
        layout[f"yaxis{place + 1}" if place else "yaxis"] = {
            "domain": [max(0.0, top - height + 0.04), top],
            "title": {"text": title},
            "type": "log" if several else "linear",
            **({"dtick": _bits(runs), "exponentformat": "power"} if title == "scale" else {"nticks": 5}),
        }
        for run, color in zip(runs, _cycle(runs), strict=True):
            values = np.where(np.isfinite(column(run)), column(run), np.nan)
            rows = thinned(values)
            line = {"shape": "hv"} if title == "scale" else {}
            data.append(
                _line(run, rows, values[rows], axis) | {"line": {"color": color, "width": 1.5, **line}, "name": _name(run, runs, title), "hovertemplate": "step %{x}<br>" + title + " %{y:.5g}<extra></extra>"}
            )
            if title == "scale":
                data += _skips(run, axis)
    return {"data": data, "layout": layout}


def _skips(run: "Run", axis: str) -> list[Figure]:
    """Returns the skipped steps as points, by their status; where there are many, the first of each bucket."""
    points: list[Figure] = []
    for status, (title, color, symbol) in SKIPS.items():
        rows = np.flatnonzero(run.status == status)
        if rows.size:
            parts = np.array_split(rows, min(BUCKETS, rows.size))
            first = np.array([part[0] for part in parts])
            more = [f"<br>and {part.size - 1} more up to step {run.step[part[-1]]}" if part.size > 1 else "" for part in parts]
            points.append(
                _line(run, first, run.scale[first], axis)
                | {"mode": "markers", "name": f"{title} ({rows.size:,})", "marker": {"color": color, "symbol": symbol, "size": 8}}
                | {"text": [f"{title}{_culprits(run, int(row))}{rest}" for row, rest in zip(first, more, strict=True)]}
                | {"hovertemplate": "step %{x}, scale %{y:.6g}<br>%{text}<extra></extra>"}
            )
    return points


def _culprits(run: "Run", row: int) -> str:
    found = run.culprits.get(row, ())
    listed = "".join(f"<br>{escaped(one.name)}: {one.kind}{'' if one.count is None else f' ({one.count:,})'}" for one in found[:5])
    return listed + (f"<br>and {len(found) - 5} more" if len(found) > 5 else "")


def heat_map(run: "Run") -> Figure | None:
    """Returns the gradients of each layer by exponent, multiplied by the scale, at each sampled step."""
    samples = {row: found for row, tallies in run.watch.items() if (found := _gradients(tallies))}
    if not samples:
        return None
    rows = [list(samples)[index] for index in np.unique(np.linspace(0, len(samples) - 1, MOST_FRAMES).astype(int))]
    names = list(dict.fromkeys(each.name for row in rows for each in samples[row]))[:MOST_LAYERS][::-1]
    low, high = BF16_LOW, BF16_HIGH
    grids = {row: _grid(samples[row], names, low, high) for row in rows}
    used = np.flatnonzero(~np.isnan(np.concatenate(list(grids.values()))).all(axis=0))
    low, high = (low + int(used[0]), low + int(used[-1])) if used.size else (-24, 15)
    left, right = min(low, -25) - 1, max(high, 16) + 1
    frames = [
        {"name": str(run.step[row]), "data": [{"z": _listed(grids[row][:, left - BF16_LOW : right + 1 - BF16_LOW])}]}
        for row in rows
    ]
    trace = {
        "type": "heatmap",
        "x": list(range(left, right + 1)),
        "y": list(range(len(names))),
        "text": [[escaped(name)] * (right - left + 1) for name in names],
        "z": frames[0]["data"][0]["z"],
        "zmin": -6,
        "zmax": 0,
        "colorscale": SHADES,
        "colorbar": {"title": {"text": "share"}, "tickvals": [-6, -4, -2, 0], "ticktext": ["1e-6", "1e-4", "1e-2", "1"], "thickness": 8},
        "hovertemplate": "%{text}<br>2^%{x}, times the scale: 10^%{z:.1f} of its elements<extra></extra>",
    }
    steps = [{"method": "animate", "label": one["name"], "args": [[one["name"]], {"mode": "immediate", "frame": {"duration": 0}}]} for one in frames]
    top = len(names) - 0.5
    bars = [_range(each, top + 0.9 + 1.1 * place, left, right) for place, each in enumerate(RANGES)]
    layout: Figure = {
        "height": 300 + 20 * len(names),
        "xaxis": {"title": {"text": "power of two of the gradient times the scale"}, "range": [left - 0.5, right + 0.5]},
        "yaxis": {"tickvals": list(range(len(names))), "ticktext": [escaped(_short(name)) for name in names], "range": [-0.5, top + 5], "automargin": True},
        "shapes": [bar for bar, _ in bars] + [_edge(run, at) for at in _edges(run)],
        "annotations": [label for _, label in bars],
        "sliders": [{"steps": steps, "currentvalue": {"prefix": "step "}, "pad": {"t": 50}}],
    }
    return {"data": [trace], "layout": layout, "frames": frames}


BF16_LOW, BF16_HIGH = -150, 140
"""Exponents that scaled gradients may have."""


def _gradients(tallies: Sequence[Tally]) -> list[Tally]:
    return [each for each in tallies if each.kind == "weight_grad"]


def _grid(tallies: Sequence[Tally], names: Sequence[str], low: int, high: int) -> Vector:
    """Returns log10 of the share of a layer's nonzero elements in each power of two, times the scale."""
    grid = np.full((len(names), high - low + 1), np.nan)
    place = {name: index for index, name in enumerate(names)}
    for each in tallies:
        if each.name in place and each.histogram.nonzero:
            counts, shift = each.histogram.host_counts, int(np.frexp(each.scale)[1] - 1)
            used = np.flatnonzero(counts)
            at = np.clip(EXPONENTS[used] + shift, low, high) - low
            grid[place[each.name], at] = np.log10(counts[used] / counts.sum())
    return grid


def _range(format: Any, y: float, left: float, right: float) -> tuple[Figure, Figure]:
    """Returns the range of a format as a bar above the layers, and its name: normal numbers, and what reaches down."""
    low, high = np.log2(format.smallest_subnormal), np.log2(format.max)
    ends = max(float(low), left - 0.5), min(float(high), right + 0.5)
    bar = {"type": "rect", "x0": ends[0], "x1": ends[1], "y0": y - 0.4, "y1": y + 0.4, "line": {"width": 0}, "fillcolor": COLORS[RANGES.index(format)], "opacity": 0.75}
    return bar, {"x": sum(ends) / 2, "y": y, "text": format.name, "showarrow": False, "font": {"color": "white", "size": 11}}


def _edges(run: "Run") -> tuple[float, float]:
    limits = get_format(run.format)
    return float(np.log2(limits.smallest_subnormal)) - 0.5, float(np.log2(limits.max)) - 0.5


def _edge(run: "Run", at: float) -> Figure:
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": COLORS[0], "width": 1.5, "dash": "dot"}}


def lost_by_layer(run: "Run") -> Figure | None:
    """Returns the share of each layer's gradient elements that the scales of the sampled steps left at zero."""
    losses: dict[str, list[float]] = {}
    for tallies in run.watch.values():
        for each in _gradients(tallies):
            losses.setdefault(each.name, []).append(lost_share(each.histogram, run.format, each.scale))
    if not losses:
        return None
    mean = sorted(((float(np.mean(found)), name) for name, found in losses.items()), reverse=True)[:30][::-1]
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "x": [share for share, _ in mean],
                "y": list(range(len(mean))),
                "text": [escaped(name) for _, name in mean],
                "textposition": "none",
                "marker": {"color": COLORS[0]},
                "hovertemplate": "%{text}: %{x:.3%}<extra></extra>",
            }
        ],
        "layout": {
            "height": 120 + 20 * len(mean),
            "xaxis": {"tickformat": ".2~%", "rangemode": "tozero", "nticks": 6},
            "yaxis": {"tickvals": list(range(len(mean))), "ticktext": [escaped(_short(name)) for _, name in mean], "automargin": True},
        },
    }


def escaped(name: str) -> str:
    """Returns a name that plotly, which reads tags in its texts, shows as it is."""
    return html.escape(name)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"


def _name(run: "Run", runs: "Sequence[Run]", title: str) -> str:
    return title if len(runs) == 1 else escaped(f"{title}: {_short(run.name)}")


def _cycle(runs: Sequence[Any]) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(len(runs))]


def _bits(runs: "Sequence[Run]") -> float:
    """Returns the distance of ticks on a logarithmic axis that shows powers of two."""
    known = [np.log2(run.scale[np.isfinite(run.scale) & (run.scale > 0)]) for run in runs]
    spread = max((float(each.max() - each.min()) for each in known if each.size), default=0)
    return float(np.log10(2) * max(1, round(spread / 6)))


def _line(run: "Run", rows: Vector, values: Vector, axis: str) -> Figure:
    return {"type": "scatter", "mode": "lines", "x": run.step[rows].tolist(), "y": _listed(values), "xaxis": "x", "yaxis": axis}


def _listed(values: Vector) -> Any:
    """Returns numbers for JSON, which has none for what is not known."""
    return np.where(np.isfinite(values), values, np.nan).astype(object).tolist() if np.isfinite(values).all() else _nulls(values.tolist())


def _nulls(values: Any) -> Any:
    if isinstance(values, list):
        return [_nulls(each) for each in values]  # pyright: ignore[reportUnknownVariableType]
    return values if np.isfinite(values) else None


__all__ = ["Figure", "Mapping", "heat_map", "lost_by_layer", "thinned", "timeline"]
