"""Records that tests write: when a test says so, not when a second is over; and what is in them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradscale.recording import writer
from gradscale.recording.form import Header, Step, read_line
from gradscale.recording.writer import RecordFile


def lines(path: Path) -> list[Header | Step]:
    """Returns what a file has, after what is in memory is written."""
    flush()
    return [read_line(line) for line in path.read_bytes().splitlines()]


def steps(path: Path) -> list[Step]:
    return [line for line in lines(path) if isinstance(line, Step)]


def headers(path: Path) -> list[Header]:
    return [line for line in lines(path) if isinstance(line, Header)]


FILES: list[RecordFile] = []


def flush() -> None:
    for file in FILES:
        file.flush()


@pytest.fixture
def on_demand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets files be written when a test says so."""
    monkeypatch.setattr(writer, "FLUSH_S", 1000.0)
    original = RecordFile.__init__

    def noted(self: RecordFile, path: str) -> None:
        original(self, path)
        self._thread = threading.current_thread()
        FILES.append(self)

    monkeypatch.setattr(RecordFile, "__init__", noted)
    yield
    FILES.clear()
