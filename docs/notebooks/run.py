"""Runs a notebook's cells in order and stores what they print, return and draw. Needs no Jupyter.

Command:  python docs/notebooks/run.py docs/notebooks/learn.ipynb
"""

import ast
import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib

Cell = dict[str, Any]


def run(notebook: dict[str, Any]) -> list[Cell]:
    """Returns the code cells of a notebook with new outputs, run one after the other in one namespace."""
    matplotlib.use("Agg")  # needs no display
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        {**cell, "execution_count": count, "outputs": _outputs("".join(cell["source"]), count, names)}
        for count, cell in enumerate(cells, 1)
    ]


def _outputs(code: str, count: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names) if last else None
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs + [{"output_type": "display_data", "metadata": {}, "data": plot} for plot in _plots()]


def _plots() -> list[dict[str, str]]:
    """Returns the figures that the cell has made, as Jupyter shows them, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    plots = []
    for number in pyplot.get_fignums() if pyplot else ():
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        plots.append({"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": "<Figure>"})
        pyplot.close(number)
    return plots


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        notebook = json.loads(path.read_text())
        ran = iter(run(notebook))
        notebook["cells"] = [next(ran) if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"ran {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
