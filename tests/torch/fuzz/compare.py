"""Compares gradscale with the reference after an operation: every number that a user can see."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tests.torch.fuzz.gradient import times
from tests.torch.fuzz.outcome import Outcome, Result
from tests.torch.fuzz.policies import INEXACT
from tests.torch.fuzz.reference import LOOSE, Reference
from tests.torch.fuzz.subject import Subject
from torch import Tensor

from gradscale.engine.saved import opened, read_saved
from gradscale.torch import MasterWeights

LOOSE_SCALE = 4 * LOOSE
"""The same of a scale that follows gradients through a logarithm and an exponential, which amplifies its rounding."""

STORAGES = {
    "fp32": {torch.float16: 0.0, torch.bfloat16: 0.0},
    "remainder": {torch.float16: 2.0**-40, torch.bfloat16: 0.0},
    "kahan": {torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15},
    "stochastic": {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7},
}
"""How far the value of each storage may be from the float32 value, relative to it, or to 1 if it is smaller."""


def differences(reference: Reference, subject: Subject, expected: Result, found: Result) -> Iterator[str]:
    """Yields what differs, one line each."""
    yield from _results(reference, expected, found)
    yield from _weights(reference, subject)
    for index in range(len(reference.optimizers)):
        yield from _states(reference, subject, index)
    yield from _gradients(reference, subject)
    for (name, mine), (_, theirs) in zip(reference.model.named_buffers(), subject.model.named_buffers(), strict=True):
        if not _same(theirs, mine):
            yield f"buffer {name} is {theirs}, expected {mine}"
    yield from _scales(reference, subject)


def _results(reference: Reference, expected: Result, found: Result) -> Iterator[str]:
    if isinstance(expected, tuple) and isinstance(found, tuple):
        for mine, theirs in zip(expected, found, strict=True):
            dense = _dense(theirs)
            if not _close(dense, mine, LOOSE if reference.setup.policy in INEXACT else 0.0):
                yield f"`scaler.grad` returned {dense}, expected {mine}"
    elif not isinstance(expected, Outcome) or not isinstance(found, Outcome):
        if expected != found:
            yield f"result is {found}, expected {expected}"
    else:
        # The scale that follows from an estimate is not known.
        expected = replace(expected, next_scale=found.next_scale) if reference.rule.estimates else expected
        yield from _outcomes(expected, found, LOOSE_SCALE if reference.setup.policy in INEXACT else 1e-6)


def _outcomes(expected: Outcome, found: Outcome, tolerance: float) -> Iterator[str]:
    for name in ("status", "retries"):
        if getattr(expected, name) != getattr(found, name):
            yield f"{name} is {getattr(found, name)}, expected {getattr(expected, name)}"
    for name in ("scale", "next_scale", "norm"):
        mine, theirs = getattr(expected, name), getattr(found, name)
        if (mine is None) != (theirs is None) or not _near(theirs, mine, tolerance):
            yield f"{name} is {theirs}, expected {mine}"
    # After an overflow inside `unscaled`, beside a loss that is not finite, NaN is as right as inf.
    amax = torch.inf if found.amax != found.amax else found.amax
    if expected.amax is not None and not _near(amax, expected.amax, tolerance):
        yield f"amax is {found.amax}, expected {expected.amax}"
    if expected.culprits is None:
        return
    counted = any(bad.count is not None for bad in expected.culprits)
    culprits = [bad if counted else replace(bad, count=None) for bad in found.culprits or ()]
    if culprits != list(expected.culprits):
        yield f"culprits are {culprits}, expected {list(expected.culprits)}"


def _near(found: float | None, expected: float | None, tolerance: float = 1e-6) -> bool:
    if found is None or expected is None:
        return True
    both_nan = found != found and expected != expected
    return both_nan or found == expected or math.isclose(found, expected, rel_tol=tolerance)


def _weights(reference: Reference, subject: Subject) -> Iterator[str]:
    """Yields weights that differ. Where bits may differ, the reference goes on from the weights of gradscale."""
    for name, mine in reference.model.named_parameters():
        theirs = subject.model.get_parameter(name)
        masters = reference.optimizers.masters_of(name)
        tolerance = reference.loose.get(name, 0.0)
        if masters is not None:
            tolerance = max(tolerance, 0.0 if masters.storage == "fp32" and not tolerance else _unit(mine))
        elif tolerance:
            tolerance = max(tolerance, _unit(mine))
        if not _close(theirs, mine, tolerance):
            yield f"weight {name} is {theirs.tolist()}, expected {mine.tolist()}"
        with torch.no_grad():
            mine.copy_(theirs)


def _unit(tensor: Tensor) -> float:
    """Returns the relative distance of neighboring numbers, for types narrower than float32."""
    return float(torch.finfo(tensor.dtype).eps) if tensor.dtype.itemsize < 4 else 0.0


def _states(reference: Reference, subject: Subject, index: int) -> Iterator[str]:
    """Yields optimizer states and masters that differ."""
    optimizer = subject.optimizers[index]
    values = dict(optimizer.masters()) if isinstance(optimizer, MasterWeights) else {}
    for name in reference.optimizers.names([index]):
        weight, leaf = subject.model.get_parameter(name), reference.optimizers.leaf(index, name)
        tolerance = reference.loose.get(name, 0.0)
        if name in reference.optimizers.masters[index] and name not in reference.optimizers.written[index]:
            allowed = STORAGES[str(reference.setup.optimizers[index].storage)][weight.dtype]
            if not _close(values[weight], leaf, max(tolerance, allowed)):
                yield f"master of {name} is {values[weight].tolist()}, expected {leaf.tolist()}"
            with torch.no_grad():
                leaf.copy_(values[weight])
        mine, theirs = reference.optimizers[index].state.get(leaf, {}), optimizer.state.get(weight, {})
        yield from _state(f"state of {name}", mine, theirs, tolerance)


def _state(what: str, mine: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> Iterator[str]:
    for key in sorted(mine.keys() | theirs.keys()):
        expected, found = mine.get(key), theirs.get(key)
        if expected is None and found is not None:
            # A fused kernel that skips the first step of a parameter has made its state already.
            if (isinstance(found, Tensor) and bool((found == 0).all())) or (not mine and theirs.get("step") == 0):
                continue
            yield f"{what}: {key} is {found}, expected none"
        elif isinstance(expected, Tensor) and isinstance(found, Tensor):
            if not _close(found, expected, tolerance):
                yield f"{what}: {key} is {_dense(found).tolist()}, expected {_dense(expected).tolist()}"
            if tolerance:
                mine[key] = found.clone()
        elif isinstance(expected, int | float) and not _near(found, expected, 0.0):
            yield f"{what}: {key} is {found}, expected {expected}"


def _gradients(reference: Reference, subject: Subject) -> Iterator[str]:
    """Yields gradients that differ, where they are defined: scaled inside a window, unscaled after a step."""
    window = reference.window
    for parameter in reference.setup.parameters:
        name = parameter.name
        grad, expected = subject.model.get_parameter(name).grad, reference.gradients.get(name)
        if (grad is None) != (expected is None):
            yield f"gradient of {name} is {grad}, expected {expected}"
        if grad is None or expected is None or name not in reference.gradients.defined:
            continue
        scale = 1.0 if window is None or name in window.unscaled else window.scale
        dense = _dense(grad)
        loose = reference.loose.get(name, LOOSE if reference.setup.policy in INEXACT else 0.0)
        scaled = times(expected.values, scale)
        if not _close(dense, scaled, loose):
            yield f"gradient of {name} is {dense.tolist()}, expected {scaled.tolist()}"
        if loose:
            expected.values = times(dense.to(expected.values.dtype), 1.0 / scale)


def _scales(reference: Reference, subject: Subject) -> Iterator[str]:
    """Yields numbers of the scale's state that differ."""
    saved = subject.scaler.state_dict()
    inexact = reference.setup.policy in INEXACT
    theirs: dict[str, Any] = opened(saved)["state"]
    for key, mine in reference.rule.state.to_dict().items():
        if isinstance(mine, str) or reference.rule.estimates:
            continue
        if not _near(float(theirs[key]), float(mine), LOOSE_SCALE if inexact else 1e-6):
            yield f"{key} of the scale is {theirs[key]}, expected {mine}"
    if inexact or reference.rule.estimates:
        reference.rule.state = read_saved(saved).state


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Returns whether tensors agree: bit for bit without a tolerance, else relative to the largest expected element."""
    found, expected = _dense(found.detach()), _dense(expected.detach()).to(found.dtype)
    if found.is_complex():
        # Which part of a complex number is NaN beside an inf is not defined.
        found, expected = (torch.where(torch.isfinite(each), each, torch.inf) for each in (found, expected))
    if not tolerance:
        return _same(found, expected)
    finite = expected[torch.isfinite(expected)]
    largest = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _same(found: Tensor, expected: Tensor) -> bool:
    """Returns whether all elements are equal; NaN equals NaN."""
    if found.shape != expected.shape:
        return False
    return torch.equal(found, expected) or bool(
        ((found == expected) | ((found != found) & (expected != expected))).all()
    )
