"""The rows that have been run, in a file, so that a study can be continued."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]


class Results:
    """The rows of a study by their keys.

    Args:
        path: file that they are read from and written to after each row; None to keep them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        saved = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self.rows: Rows = saved.get("rows", {})
        self.made_by: list[dict[str, str | None]] = saved.get("made_by", [])
        self._entry = -1

    def start(self, made_by: Mapping[str, str | None]) -> None:
        """Notes what makes the next rows: the command, the commit, the machine and the versions. One entry for each."""
        if made_by not in self.made_by:
            self.made_by.append(dict(made_by))
        self._entry = self.made_by.index(dict(made_by))

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Adds a row, with the number of the entry that says what made it, and writes the file."""
        self.rows[key] = row | {"made_by": self._entry}
        if self._path is not None:
            # By key, whatever the order in which several processes have finished.
            text = json.dumps({"made_by": self.made_by, "rows": dict(sorted(self.rows.items()))}, indent=1)
            # Replaced in one go: a study that is stopped while it writes must not lose its rows.
            unfinished = self._path.with_suffix(".part")
            unfinished.write_text(text + "\n", encoding="utf-8")
            unfinished.replace(self._path)
