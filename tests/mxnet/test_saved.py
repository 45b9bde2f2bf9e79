"""A trainer and its scaler continue from files as if they had not stopped."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mxnet.helpers import TWO, backward, make_parameter, make_trainer

from gradscale import Dynamic, Headroom, Policy, preset
from gradscale.mxnet import LossScaler, init_trainer

SLOPES = [(0.5, 0.25, 1.0), (math.inf, 1.0, 1.0), (1e-3, 0.0, 2e-3), (0.5, math.nan, 0.0), (1e-5, 1e-6, 0.0), (1, 2, 3)]


def begin(policy: Policy | None) -> tuple[Any, LossScaler]:
    trainer = make_trainer(make_parameter(TWO, "float16"))
    return trainer, init_trainer(trainer, policy, clip_norm=1.0)


def walk(trainer: Any, slopes: Any) -> None:
    for slope in slopes:
        backward(trainer, slope, slope)
        trainer.step(1)


def weights(trainer: Any) -> list[Any]:
    return [data.asnumpy().tolist() for data in trainer._params[0].list_data()]


@pytest.mark.parametrize(
    "policy",
    [None, Dynamic(growth_interval=2, hysteresis=2), Headroom(), preset("megatron")],
    ids=["mxnet", "dynamic", "headroom", "megatron"],
)
def test_a_run_resumes_bit_exactly(policy: Policy | None, tmp_path: Path) -> None:
    whole, whole_scaler = begin(policy)
    walk(whole, SLOPES)

    first, scaler = begin(policy)
    walk(first, SLOPES[:3])
    first.save_states(str(tmp_path / "trainer.states"))
    scaler.save(tmp_path / "scaler.json")
    saved = first._params[0].data(TWO[0])

    second, resumed = begin(Dynamic(init_scale=2.0))
    second._params[0].set_data(saved)
    second.load_states(str(tmp_path / "trainer.states"))
    resumed.load(tmp_path / "scaler.json")
    walk(second, SLOPES[3:])
    assert weights(second) == weights(whole)
    assert (resumed.policy, resumed.state_dict()) == (whole_scaler.policy, whole_scaler.state_dict())


def test_the_file_is_json_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    trainer, scaler = begin(None)
    walk(trainer, SLOPES)
    scaler.save(tmp_path / "scaler.json")
    assert json.loads((tmp_path / "scaler.json").read_text()) == scaler.state_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["scaler.json"]


@pytest.mark.parametrize("text", ["", "{", '{"policy": NaN'], ids=["empty", "cut off", "wrong"])
def test_a_damaged_file_is_refused_and_nothing_has_changed(text: str, tmp_path: Path) -> None:
    _, scaler = begin(None)
    before = scaler.state_dict()
    (tmp_path / "scaler.json").write_text(text)
    with pytest.raises(ValueError, match=r"must name a JSON file that `save` wrote\. Received: .*scaler\.json"):
        scaler.load(tmp_path / "scaler.json")
    assert scaler.state_dict() == before


def test_another_dict_is_refused_and_nothing_has_changed() -> None:
    _, scaler = begin(None)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="has the keys"):
        scaler.load_state_dict({"scale": 4.0})
    assert scaler.state_dict() == before


def test_metrics_are_plain_numbers() -> None:
    trainer, scaler = begin(Dynamic())
    assert math.isnan(scaler.metrics()["grad_norm"])
    walk(trainer, SLOPES[:2])
    found = scaler.metrics()
    assert {name: found[name] for name in ("scale", "applied", "skipped", "skip_rate")} == {
        "scale": 16384.0,
        "applied": 0.0,
        "skipped": 2.0,
        "skip_rate": 1.0,
    }
    assert all(type(value) is float for value in found.values())
    assert np.isinf(found["grad_norm"])
