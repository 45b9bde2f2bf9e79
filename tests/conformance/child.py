"""An adapter in a process of its own: for a framework that is set up once and for all when a process imports it.

`python -m tests.conformance.child MODULE` serves the `ADAPTER` of a module. Calls come in and answers go out as
pickles, of numpy arrays and gradscale's own values, between two processes that trust each other.
"""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tests.conformance.adapters import NO_TABLES, Array, Difference, Session, Step

from gradscale import Policy

ROOT = Path(__file__).parents[2]


class ChildSession:
    """A session of the adapter in the child."""

    def __init__(self, child: "ChildAdapter", number: int) -> None:
        self._child = child
        self._number = number

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        return self._child.ask("step", self._number, dict(grads), {"clip_norm": clip_norm, "loss": loss})

    def state(self) -> dict[str, Any]:
        return self._child.ask("state", self._number)

    def metrics(self) -> dict[str, Any] | None:
        return self._child.ask("metrics", self._number)


class ChildAdapter:
    """Runs the adapter of another module in a process with its own environment, started when it is first needed."""

    sampled = NO_TABLES

    def __init__(
        self, module: str, environment: Mapping[str, str], dtypes: frozenset[str], differs: Mapping[Difference, str]
    ) -> None:
        self.dtypes = dtypes
        self.differs = differs
        self._module = module
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> ChildSession:
        return ChildSession(self, self.ask("open", policy, dict(params), lr))

    def default(self) -> Policy:
        return self.ask("default")

    def ask(self, *call: Any) -> Any:
        """Returns what the child answers to a call; raises if it raised."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        send(process.stdin, call)
        answer = pickle.load(process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.child", self._module],
            cwd=ROOT,
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


def send(stream: BinaryIO | Any, value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def serve(module: str) -> None:
    """Answers calls until the parent has gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a framework prints must not get among the answers
    adapter = importlib.import_module(module).ADAPTER
    sessions: list[Session] = []
    with contextlib.suppress(EOFError):
        while True:
            call = pickle.load(sys.stdin.buffer)
            try:
                answer = answered(adapter, sessions, *call)
            except Exception:
                answer = RuntimeError(f"in the child:\n{traceback.format_exc()}")  # not every exception can be pickled
            send(answers, answer)


def answered(adapter: Any, sessions: list[Session], verb: str, *arguments: Any) -> Any:
    if verb == "open":
        sessions.append(adapter.open(*arguments))
        return len(sessions) - 1
    if verb == "default":
        return adapter.default()
    session = sessions[arguments[0]]
    if verb == "step":
        return session.step(arguments[1], **arguments[2])
    return session.state() if verb == "state" else session.metrics()


if __name__ == "__main__":
    serve(sys.argv[1])
