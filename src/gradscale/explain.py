"""What the `explain` of every framework has in common: its rows, its advice on scaling and its text."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gradscale._table import text_table
from gradscale.formats import FP16

NEEDED = (
    f"needed. FP16 holds nothing below {FP16.smallest_subnormal:.1e} and nothing above {FP16.max:g}: without one, "
    "small gradients vanish."
)
NOT_NEEDED_BF16 = "not needed. BF16 has the range of float32: gradients neither vanish nor overflow without one."
NOT_NEEDED = "not needed. Everything runs in float32."


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers of a model with the same class and dtypes.

    Attributes:
        name: their name; of several, what their names have in common.
        count: how many they are.
        kind: their class.
        weights: dtypes of their own weights; empty if they have none.
        compute_dtype: the dtype that they compute in.
        elements: how many elements their weights have together.
        buffers: dtypes of their own buffers; empty if they have none, or if the framework has no buffers.
    """

    name: str
    count: int
    kind: str
    weights: str
    compute_dtype: str
    elements: int
    buffers: str = ""


def merged_rows(
    rows: Iterable[tuple[str, LayerRow]], shared_name: Callable[[Sequence[str]], str]
) -> tuple[LayerRow, ...]:
    """Returns one row for all layers with the same pattern, class and dtypes, named by `shared_name`."""
    groups: defaultdict[tuple[str, LayerRow], list[LayerRow]] = defaultdict(list)
    for pattern, row in rows:
        groups[pattern, replace(row, name="", elements=0)].append(row)
    return tuple(
        replace(
            common,
            name=shared_name([row.name for row in group]),
            count=len(group),
            elements=sum(row.elements for row in group),
        )
        for (_, common), group in groups.items()
    )


def scaling_advice(dtypes: Collection[str]) -> str:
    """Returns whether a scaler is needed, and why.

    >>> scaling_advice({"bfloat16", "float32"})
    'not needed. BF16 has the range of float32: gradients neither vanish nor overflow without one.'

    Args:
        dtypes: of everything that layers compute in, and of all weights that are trained.
    """
    if "float16" in dtypes:
        return NEEDED
    return NOT_NEEDED_BF16 if "bfloat16" in dtypes else NOT_NEEDED


def scaler_warning(scaling: str, *, scales: bool, add: str, remove: str) -> str | None:
    """Returns the warning about a scaler that is missing or not needed, or None.

    `scaling` is what `scaling_advice` returned, `scales` whether losses are scaled. `add` and `remove` are sentences on
    how to add or remove a scaler.
    """
    if scaling == NEEDED and not scales:
        return f"FP16 runs with no scaler: small gradients vanish, and the model stops learning. {add}"
    if scaling != NEEDED and scales:
        return f"A scaler runs for nothing: there is no FP16 here, and it reads every gradient at every step. {remove}"
    return None


def layer_table(heading: str, rows: Iterable[LayerRow], *, buffers: bool) -> str:
    """Returns a table of layers under the framework's `heading` for them, with a column for buffers if asked for."""
    columns = [heading, "class", "weights", *(["buffers"] if buffers else []), "computes in", "elements"]
    return text_table(columns, [_cells(row, buffers) for row in rows])


def _cells(row: LayerRow, buffers: bool) -> list[str]:
    name = row.name or "(the model itself)"
    shown = f"{name} ({row.count})" if row.count > 1 else name
    own = [row.weights, row.buffers] if buffers else [row.weights]
    return [shown, row.kind, *own, row.compute_dtype, f"{row.elements:,}"]


def explanation_text(tables: Sequence[str], scaling: str, warnings: Iterable[str]) -> str:
    """Returns an explanation as text: tables, the advice on scaling, and the warnings."""
    return "\n".join([*tables, f"Scaler: {scaling}", *(f"Warning: {warning}" for warning in warnings)])
