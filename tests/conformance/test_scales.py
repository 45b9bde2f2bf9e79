"""Every adapter moves the scale as the table says when a policy measures the gradients, whether it clips or not."""

import numpy as np
import pytest
from tests.conformance.adapters import Adapter
from tests.conformance.scales import CLIPS, ELEMENTS, LOSS_CASES, SCALE_CASES, ScaleCase
from tests.conformance.skips import skip_if_sampled


@pytest.mark.parametrize("clip_norm", CLIPS, ids=lambda clip_norm: f"clip_norm={clip_norm}")
@pytest.mark.parametrize("case", SCALE_CASES, ids=lambda case: case.name)
def test_the_scale_follows_the_gradients_of_the_table(
    adapter: Adapter, case: ScaleCase, clip_norm: float | None
) -> None:
    skip_if_sampled(adapter, "scales", case, SCALE_CASES)
    run(adapter, case, clip_norm)


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_a_loss_that_is_not_finite_holds_the_scale_under_every_policy(adapter: Adapter, case: ScaleCase) -> None:
    run(adapter, case, None)


def run(adapter: Adapter, case: ScaleCase, clip_norm: float | None) -> None:
    params = {name: np.zeros(ELEMENTS, np.float32) for name in ("first", "second")}
    session = adapter.open(case.policy, params, lr=0.125)
    for number, row in enumerate(case.rows):
        scaled = (np.array(row.grads) * session.state()["scale"]).astype(np.float32)
        grads = {name: np.full(ELEMENTS, value) for name, value in zip(params, scaled, strict=True)}
        step = session.step(grads, clip_norm=clip_norm, loss=row.loss)
        assert session.state()["scale"] == row.scale, number
        assert step.reported is None or step.reported.next_scale == row.scale, number
