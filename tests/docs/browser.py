"""Drives a headless Chromium by its DevTools protocol, over pipes: no other package is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless",
    "--no-sandbox",  # the sandbox refuses to run as root, as in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--remote-debugging-pipe",
)

LONGEST_S = 60
"""How long a condition may take to come true: a loaded machine is no fault of the page's."""


def chromium() -> str | None:
    """Returns the path of a Chromium on this machine, that of `CHROMIUM` first; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)


class Page:
    """One page of the browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._count = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self.requested: list[str] = []
        self._call("Network.enable")

    def open(self, path: Path) -> None:
        """Opens a file and waits until it has loaded, with its deferred scripts."""
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression.

        Raises:
            RuntimeError: it threw.
        """
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + LONGEST_S
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {LONGEST_S} s: {condition}")
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        """Presses a key on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the view, as a phone or a screen of that size has it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def screenshot(self, path: Path) -> None:
        """Writes what the view shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise ConnectionError("Chromium has ended.")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Yields a page of a new Chromium with an empty profile in `profile`, and ends it afterwards."""
    command = chromium()
    assert command is not None
    commands, to_chromium = os.pipe()
    from_chromium, answers = os.pipe()
    process = _start([command, *FLAGS, f"--user-data-dir={profile}"], commands, answers)
    os.close(commands)
    os.close(answers)
    try:
        yield Page(to_chromium, from_chromium)
    finally:
        os.close(to_chromium)
        process.terminate()
        process.wait(timeout=LONGEST_S)
        os.close(from_chromium)


def _start(command: list[str], commands: int, answers: int) -> subprocess.Popen[bytes]:
    """Starts Chromium, which reads commands from file descriptor 3 and answers on 4."""
    # bash moves them there: Popen cannot choose numbers. From 20 on they are in the way of neither.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (commands, answers)]
    try:
        return subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', *command],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    finally:
        for descriptor in high:
            os.close(descriptor)
