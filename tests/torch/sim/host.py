"""What the host has to wait for: copies from and to the simulated device, and events."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

OWN = {str(Path(__file__).with_name(name)) for name in ("autocast.py", "device.py", "host.py", "kernels.py")}


@dataclass
class Waits:
    """What made the host wait, each with the lines of code that asked for it.

    Attributes:
        reads: copies to the host, waits for an event or for the whole device, and results whose shape is data.
        uploads: copies to the device that are not `non_blocking`.
    """

    reads: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)


_ALL = Waits()
_PENDING: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not arrived: target, and source
_settings = {"forbid": False, "busy": False}


@contextmanager
def waits(forbid: bool = False) -> Iterator[Waits]:
    """Yields the waits made inside, complete once they are over. With `forbid`, a read raises RuntimeError."""
    found, reads, uploads = Waits(), len(_ALL.reads), len(_ALL.uploads)
    with _set("forbid", forbid):
        try:
            yield found
        finally:
            found.reads += _ALL.reads[reads:]
            found.uploads += _ALL.uploads[uploads:]


@contextmanager
def busy() -> Iterator[None]:
    """Makes the device fall behind: a copy to the host arrives only when the host waits, or at `arrive`.

    Elsewhere it has arrived as soon as its event is asked. Until then the host's memory holds garbage in both cases.
    """
    with _set("busy", True):
        yield


@contextmanager
def _set(name: str, value: bool) -> Iterator[None]:
    before, _settings[name] = _settings[name], value
    try:
        yield
    finally:
        _settings[name] = before


def arrive() -> None:
    """Lets every copy to the host arrive."""
    while _PENDING:
        target, source = _PENDING.pop(0)
        target.copy_(source)


def send(target: Tensor, source: Tensor) -> None:
    """Begins a copy to the host. Both are tensors of the CPU here."""
    target.fill_(float("nan") if target.dtype.is_floating_point else 0xBD)
    _PENDING.append((target, source.clone()))


def note_read(what: str) -> None:
    """Notes that the host waits for the device, and lets every copy arrive."""
    _ALL.reads.append(f"{what} at {_callers()}")
    arrive()
    if _settings["forbid"]:
        raise RuntimeError(f"The host waits for the device: {_ALL.reads[-1]}")


def note_upload(what: str) -> None:
    """Notes that the host waits for the end of a copy to the device."""
    _ALL.uploads.append(f"{what} at {_callers()}")


def _callers() -> str:
    """Returns the three innermost lines that are neither torch's nor the device's."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if "site-packages" not in path and path not in OWN:
            lines.append("/".join(Path(path).parts[-2:]) + f":{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class Event:
    """What `torch.Event` is for other devices: torch's own cannot be recorded on a device that is written in Python."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device
        self._last: tuple[Tensor, Tensor] | None = None

    def record(self, stream: Any = None) -> None:
        self._last = _PENDING[-1] if _PENDING else None

    def query(self) -> bool:
        if not _settings["busy"]:
            arrive()
        return all(pending is not self._last for pending in _PENDING)

    def synchronize(self) -> None:
        if not self.query():
            note_read("event.synchronize")
