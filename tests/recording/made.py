"""Records that tests write: by hand, and of policies that run on given gradients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradscale import Dynamic, Policy, Seen, Status
from gradscale.engine.saved import write_saved
from gradscale.policies.contract import advanced
from gradscale.recording.form import Header, Step

THRESHOLD = 65520.0


def header(policy: Policy, state: Any = None, **more: Any) -> Header:
    return Header(gradscale="0.1.0", **write_saved(policy, policy.start() if state is None else state), **more)


def record(folder: Path, *steps: Step, policy: Policy | None = None, name: str = "run.jsonl") -> Path:
    """Writes a record and returns its path."""
    path = folder / name
    begin = header(Dynamic() if policy is None else policy)
    path.write_text("".join([begin.line(), *(step.line() for step in steps)]))
    return path


def trained(folder: Path, policy: Policy, amax: Sequence[float], bad_losses: Sequence[int] = (), **more: Any) -> Path:
    """Writes the record of a run whose steps have these largest gradients; `more` are functions of their number."""
    state, steps = policy.start(), list[Step]()
    for number, peak in enumerate(np.asarray(amax, np.float32)):
        bad = number in bad_losses
        fits = float(peak) * float(state.scale) < THRESHOLD and not bad
        status = Status.of(fits, not bad)
        shown = peak if fits else np.float32(np.inf)
        extra = {name: make(number) for name, make in more.items()}
        steps.append(Step(step=number, scale=float(state.scale), status=status, amax=float(shown), **extra))
        seen = Seen(finite=np.bool_(fits), loss_finite=np.bool_(not bad), amax=shown, norm=shown)
        state = advanced(policy, state, seen, np)
    return record(folder, *steps, policy=policy)


def peaks(steps: int, seed: int = 0) -> list[float]:
    """Returns largest gradients that fall by 4 bits, with noise and a spike now and then."""
    rng = np.random.default_rng(seed)
    spikes = np.where(rng.random(steps) < 0.01, 50.0, 1.0)
    return (np.exp(rng.normal(size=steps) * 0.5 - 3 - 3 * np.arange(steps) / steps) * spikes).tolist()
