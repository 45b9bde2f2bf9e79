"""What `explain` returns: rows of values, which print as a table."""

from dataclasses import dataclass

from gradscale._table import text_table

COLUMNS = ("layer", "class", "weights", "computes in", "elements")


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers of a model that are alike.

    Attributes:
        name: the path; of several, without the numbers that tell them apart.
        count: how many they are.
        kind: their class.
        weights: dtypes of their own weights; empty if they have none.
        runs: the dtype they compute in.
        elements: how many elements their weights have together.
    """

    name: str
    count: int
    kind: str
    weights: str
    runs: str
    elements: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        layers: what computes in which precision.
        optimizer: class of the optimizer, with what is inside it; empty for a model that is not compiled.
        scaling: whether a scaler is needed, and why.
        warnings: what is likely to be a mistake.
    """

    layers: tuple[LayerRow, ...]
    optimizer: str
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns a table of layers, and what there is to say about scaling."""
        told = [f"Optimizer: {self.optimizer or 'none: the model is not compiled'}", f"Scaler: {self.scaling}"]
        told += [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join([text_table(COLUMNS, map(_cells, self.layers)), *told])


def _cells(row: LayerRow) -> list[str]:
    shown = f"{row.name} ({row.count})" if row.count > 1 else row.name
    return [shown, row.kind, row.weights, row.runs, f"{row.elements:,}"]
