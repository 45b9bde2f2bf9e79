"""A table as plain text."""

from collections.abc import Iterable, Sequence
from io import StringIO

WIDTH = 120


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table without colours, at most 120 characters wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=WIDTH, highlight=False, markup=False, emoji=False, color_system=None).print(table)
    return "\n".join(line.strip() for line in text.getvalue().strip().splitlines()) + "\n"
