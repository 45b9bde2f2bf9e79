"""What `explain` returns: rows of values, which print as tables."""

from dataclasses import dataclass

from gradscale._table import text_table


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules of a model that are alike.

    Attributes:
        name: the name; of several, the names with a star where they differ.
        count: how many they are.
        kind: their class.
        weights: dtypes of their own weights; empty if they have none.
        buffers: dtypes of their own buffers; empty if they have none.
        runs: the dtype they compute in, or that of their input.
        elements: how many elements their weights have together.
    """

    name: str
    count: int
    kind: str
    weights: str
    buffers: str
    runs: str
    elements: int


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What an optimizer holds, in bytes for each element that it trains.

    Attributes:
        kind: its class.
        elements: how many elements it trains.
        state: dtypes of its state; empty before its first step.
        weight_bytes: bytes of the model's weights.
        master_bytes: bytes kept beside half weights.
        grad_bytes: bytes of the gradients.
        state_bytes: bytes of the state.
    """

    kind: str
    elements: int
    state: str
    weight_bytes: float
    master_bytes: float
    grad_bytes: float
    state_bytes: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printed, it is a table.

    Attributes:
        modules: what runs in which precision.
        optimizers: what is stored for each element.
        scaling: whether a scaler is needed, and why.
        warnings: what is likely to be a mistake.
    """

    modules: tuple[ModuleRow, ...]
    optimizers: tuple[OptimizerRow, ...]
    scaling: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Returns tables of modules and optimizers, and what there is to say about scaling."""
        tables = [text_table(MODULE_COLUMNS, [_module_cells(row) for row in self.modules])]
        if self.optimizers:
            tables.append(text_table(OPTIMIZER_COLUMNS, [_optimizer_cells(row) for row in self.optimizers]))
        told = [f"Scaler: {self.scaling}", *(f"Warning: {warning}" for warning in self.warnings)]
        return "\n".join([*tables, *told])


MODULE_COLUMNS = ("module", "class", "weights", "buffers", "runs in", "elements")
OPTIMIZER_COLUMNS = ("optimizer", "state in", "elements", "weight", "master", "gradient", "state", "bytes in all")


def _module_cells(row: ModuleRow) -> list[str]:
    name = row.name or "(the model itself)"
    shown = f"{name} ({row.count})" if row.count > 1 else name
    return [shown, row.kind, row.weights, row.buffers, row.runs, f"{row.elements:,}"]


def _optimizer_cells(row: OptimizerRow) -> list[str]:
    held = [row.weight_bytes, row.master_bytes, row.grad_bytes, row.state_bytes]
    state = row.state or "none before the first step"
    return [row.kind, state, f"{row.elements:,}", *(f"{size:.3g}" for size in (*held, sum(held)))]
