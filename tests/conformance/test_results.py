"""Every adapter's result and metrics have the same names, and mean the same by them."""

import math
from typing import Any

import numpy as np
import pytest
from tests.conformance.adapters import Adapter, Array, Difference
from tests.conformance.gradient_types import NUMPY_TYPES, parameter_type, skip_unless_taken
from tests.conformance.reported import Reported
from tests.conformance.results import EXTREMES, NO_GRADS, RESULT_CASES, Report, ResultCase
from tests.conformance.skips import losses, skip_if_different, skip_if_sampled

from gradscale import FP16, Dynamic, Headroom, NoScaling, Policy, Static, Status
from gradscale.engine.culprits import Culprit
from gradscale.engine.metrics import METRICS

TOLERANCE = 1e-6


def involved(case: ResultCase) -> set[Difference]:
    found = losses(report.loss for report in case.steps)
    found |= {"no grads"} if any(report.status is NO_GRADS for report in case.steps) else set()
    return found | ({"no scaling"} if isinstance(case.policy, NoScaling) else set())


@pytest.mark.parametrize("grad", [1.0, math.nan, None], ids=["applied", "overflow", "no grads"])
def test_the_result_has_every_name(adapter: Adapter, grad: float | None) -> None:
    skip_if_different(adapter, ["result", *(["no grads"] if grad is None else [])])
    session = adapter.open(Dynamic(), {"weight": np.zeros(1, "f4")}, lr=0.125)
    found = session.step({"weight": None if grad is None else np.array([grad], "f4")}).reported
    assert found is not None
    assert found.missing == ()


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("policy", [Static(1024.0), Headroom(init_scale=1024.0)], ids=["Static", "Headroom"])
@pytest.mark.parametrize("grads", EXTREMES.values(), ids=EXTREMES)
def test_the_result_agrees_with_itself(
    adapter: Adapter, grads: list[float], policy: Policy, clip_norm: float | None
) -> None:
    """Whether such gradients are applied or skipped is up to the kernels; what is reported must then be so."""
    skip_if_different(adapter, ["result"])
    if "results" in adapter.sampled:
        pytest.skip("compiles every case: it runs the first of each kind of policy")
    session = adapter.open(policy, {"weight": np.zeros(4, "f4")}, lr=0.125)
    step = session.step({"weight": np.array(grads, "f4")}, clip_norm=clip_norm)
    assert step.reported is not None
    sizes = [size for size in (step.reported.amax, step.reported.grad_norm) if size is not None]
    assert np.isfinite(step.params["weight"]).all()
    if step.reported.applied:
        assert np.isfinite(sizes).all()
        assert step.reported.culprits == []
    else:
        assert step.reported.status is Status.OVERFLOW
        assert np.isinf(sizes).all()
        assert 0 not in [culprit.count for culprit in step.reported.culprits]


@pytest.mark.parametrize("case", RESULT_CASES, ids=lambda case: case.name)
def test_what_every_step_reports_is_as_the_table_says(adapter: Adapter, case: ResultCase) -> None:
    skip_if_sampled(adapter, "results", case, RESULT_CASES)
    skip_if_different(adapter, involved(case))
    skip_unless_taken(adapter, case.dtype)
    params = {name: np.zeros(size, parameter_type(case.dtype)) for name, size in case.elements.items()}
    session = adapter.open(case.policy, params, lr=0.125)
    for number, report in enumerate(case.steps):
        scale = session.state()["scale"]
        dtype = NUMPY_TYPES[case.dtype]
        grads = {name: scaled(report.grads.get(name), size, scale, dtype) for name, size in case.elements.items()}
        step = session.step(grads, clip_norm=case.clip_norm, loss=report.loss)
        wants_norm = report.norm is not None and case.clip_norm is not None and "norm" not in adapter.differs
        has_amax = report.amax is not None and "amax" in case.policy.needs
        if (found := step.reported) is not None:
            may_lack = {name for name, known in (("amax", has_amax), ("grad_norm", wants_norm)) if not known}
            assert_result(found, expected_result(report, scale, session.state()["scale"]), may_lack, number)
            assert_culprits(found.culprits, report.culprits, number)
        if (metrics := session.metrics()) is not None:
            # Where a policy does not need the largest magnitude, it may be that of the last step that measured it.
            skipped = set() if has_amax else {"headroom_bits"}
            assert_metrics(metrics, expected_metrics(report, session.state()), skipped, number)


def scaled(values: list[float] | None, size: int, scale: float, dtype: Any) -> Array | None:
    """Returns the gradient that a backward pass makes of a loss times `scale`."""
    return None if values is None else (np.array(values + [0.0] * (size - len(values))) * scale).astype(dtype)


def assert_result(found: Reported, expected: dict[str, Any], may_lack: set[str], number: int) -> None:
    there = [name for name in expected if name not in found.missing]  # what is not fails the test of names
    lacking = dict.fromkeys(name for name in may_lack if getattr(found, name) is None)
    values = {name: getattr(found, name) for name in there}
    assert values == {name: value for name, value in (expected | lacking).items() if name in there}, number
    assert type(found.status) is Status
    # Plain values, once they are on the host: True is not 1, nor is 1 the same as 1.0.
    flags = {"applied", "skipped", "loss_finite", "attempted"} & values.keys()
    assert {name: type(values[name]) for name in flags} == dict.fromkeys(flags, bool)
    assert type(values.get("retries", 0)) is int
    sizes = (found.scale, found.next_scale, found.amax, found.grad_norm)
    assert {type(size) for size in sizes if size is not None} == {float}


def assert_metrics(found: dict[str, Any], expected: dict[str, Any], skipped: set[str], number: int) -> None:
    unknown = {name for name in ("grad_norm", "headroom_bits") if math.isnan(found.get(name, math.nan))}
    known = [name for name in found if name not in unknown | skipped]  # one that is not there fails the test of names
    assert {name: found[name] for name in known} == {name: expected[name] for name in known}, number


def assert_culprits(found: list[Culprit], expected: tuple[Culprit, ...] | None, number: int) -> None:
    if expected is not None:
        assert [(one.name, one.kind) for one in found] == [(one.name, one.kind) for one in expected], number
        for one, other in zip(found, expected, strict=True):
            assert one.count in (None, other.count), number
    assert type(found) is list
    assert {type(one) for one in found} <= {Culprit}


def expected_result(report: Report, scale: float, next_scale: float) -> dict[str, Any]:
    applied = report.status is Status.APPLIED
    return {
        "status": report.status,
        "applied": applied,
        "skipped": not applied,
        "scale": scale,
        "next_scale": next_scale,
        "loss_finite": math.isfinite(report.loss),
        "grad_norm": None if report.norm is None else pytest.approx(report.norm, rel=TOLERANCE),
        "amax": report.amax,
        "retries": 0,
        "attempted": bool(report.grads),
    }


def expected_metrics(report: Report, state: dict[str, Any]) -> dict[str, Any]:
    applied, skipped = state["applied"], state["skipped"]
    peak = math.nan if report.amax is None else report.amax * state["scale"]
    return {
        "scale": state["scale"],
        "applied": applied,
        "skipped": skipped,
        "skip_rate": pytest.approx(skipped / max(1, applied + skipped), rel=TOLERANCE),
        "grad_norm": None if report.norm is None else pytest.approx(report.norm, rel=TOLERANCE),
        "headroom_bits": pytest.approx(math.log2(FP16.max / peak), abs=1e-5) if 0 < peak < math.inf else None,
    }


def test_metrics_have_every_name(adapter: Adapter) -> None:
    skip_if_different(adapter, ["metrics"])
    session = adapter.open(Dynamic(init_scale=1024.0), {"weight": np.zeros(1, "f4")}, lr=0.125)
    before = session.metrics()
    session.step({"weight": np.ones(1, "f4")})
    after = session.metrics()
    assert before is not None
    assert after is not None
    assert tuple(before) == tuple(after) == METRICS
    assert [before[name] for name in ("scale", "applied", "skipped", "skip_rate")] == [1024.0, 0, 0, 0.0]
    assert math.isnan(before["grad_norm"])
    assert math.isnan(before["headroom_bits"])
