"""A table as plain text."""

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap

WIDTH = 120
GAP = "  "


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]], whole: Collection[str] = ()) -> str:
    """Returns a table without colors, at most 120 characters wide. A cell that does not fit takes several lines.

    Columns in `whole` keep each cell on one line, so that names can be searched for; others then break at spaces only,
    and the table may be wider.
    """
    cells = [columns, *rows]
    natural = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lowest = [
        0 if not whole else width if name in whole else max(len(word) for cell in column for word in cell.split())
        for name, width, column in zip(columns, natural, zip(*cells, strict=True), strict=True)
    ]
    room = WIDTH - len(GAP) * (len(columns) - 1)

    def widths_at(cap: int) -> list[int]:
        return [max(low, min(cap, width)) for low, width in zip(lowest, natural, strict=True)]

    # Only the widest columns give way, down to one common width.
    widths = next(found for cap in range(WIDTH, 0, -1) if sum(found := widths_at(cap)) <= room or cap == 1)
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
