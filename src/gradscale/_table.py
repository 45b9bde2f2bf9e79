"""A table as plain text."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap

WIDTH = 120
GAP = "  "


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table without colors, at most 120 characters wide. A cell that does not fit takes several lines."""
    cells = [columns, *rows]
    natural = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = WIDTH - len(GAP) * (len(columns) - 1)
    # Only the widest columns give way, down to one common width.
    widest = next(cap for cap in range(WIDTH, 0, -1) if cap == 1 or sum(min(cap, width) for width in natural) <= room)
    widths = [min(widest, width) for width in natural]
    heading, *lines = (_lines(row, widths) for row in cells)
    rule = "─" * (sum(widths) + len(GAP) * (len(columns) - 1))
    return "\n".join([*heading, rule, *(line for row in lines for line in row)]) + "\n"


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Returns the lines of one row."""
    folded = [wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
    return [
        GAP.join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*folded, fillvalue="")
    ]
