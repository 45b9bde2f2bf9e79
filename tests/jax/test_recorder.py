"""`Recorder`: results of compiled steps, written when they have arrived."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.recording.files import flush, headers, on_demand, steps  # noqa: F401

from gradscale import Dynamic
from gradscale.jax import Recorder, Scaler, apply, value_and_grad

pytestmark = pytest.mark.usefixtures("on_demand")

TX = optax.sgd(0.01)


@jax.jit
def step(scaler: Scaler, params: Any, x: Any) -> Any:
    loss, grads, scaler, result = value_and_grad(lambda p, x: jnp.sum((p["w"] * x) ** 2), clip_norm=1.0)(
        scaler, params, x
    )
    params, _ = apply(TX, grads, TX.init(params), params, result)
    return loss, scaler, params, result


def train(recorder: Recorder, scaler: Scaler, count: int, bad: int | None = None) -> tuple[Scaler, list[Any]]:
    params, made = {"w": jnp.ones(3)}, []
    for number in range(count):
        x = jnp.array([1, 2, 1e30 if number == bad else 3], np.float32)
        loss, scaler, params, result = step(scaler, params, x)
        recorder.step(result, loss=loss, lr=0.01)
        made.append((float(result.scale), result.status(), float(result.grad_norm), float(loss)))
    return scaler, made


def test_every_result_is_a_step(tmp_path: Path) -> None:
    scaler = Scaler(Dynamic(init_scale=8.0, growth_interval=2))
    recorder = Recorder(tmp_path / "run.jsonl", scaler)
    _, made = train(recorder, scaler, 6, bad=3)
    found = steps(tmp_path / "run.jsonl")
    assert [(each.scale, each.status, np.float32(each.norm)) for each in found] == [each[:3] for each in made]
    assert [each.step for each in found] == list(range(6))
    assert [np.float32(each.note["loss"]) for each in found] == [each[3] for each in made]
    assert [each.name for each in found[3].culprits] == ["w"]
    (header,) = headers(tmp_path / "run.jsonl")
    assert (header.framework, header.framework_version) == ("jax", jax.__version__)
    assert header.saved().state == scaler.policy.start()


def test_a_run_that_is_resumed_counts_on(tmp_path: Path) -> None:
    first = Scaler(Dynamic(init_scale=8.0))
    first, _ = train(Recorder(tmp_path / "run.jsonl", first), first, 3)
    flush()
    train(Recorder(tmp_path / "run.jsonl", Scaler.from_dict(first.to_dict())), first, 2)
    assert [each.step for each in steps(tmp_path / "run.jsonl")] == [0, 1, 2, 3, 4]
    assert [header.resumed for header in headers(tmp_path / "run.jsonl")] == [False, True]


def test_what_is_on_its_way_is_not_waited_for(tmp_path: Path) -> None:
    class Arriving:
        ready = False

        def is_ready(self) -> bool:
            return self.ready

        def copy_to_host_async(self) -> None:
            pass

        def __float__(self) -> float:
            assert self.ready
            return 0.5

    scaler, loss = Scaler(Dynamic()), Arriving()
    recorder = Recorder(tmp_path / "run.jsonl", scaler)
    _, scaler, params, result = step(scaler, {"w": jnp.ones(3)}, jnp.ones(3))
    recorder.step(result, loss=loss)
    assert not (tmp_path / "run.jsonl").exists()
    loss.ready = True
    recorder.step(step(scaler, params, jnp.ones(3))[-1])
    assert [each.note for each in steps(tmp_path / "run.jsonl")] == [{"loss": 0.5}, {}]


def test_other_processes_than_the_first_write_only_files_of_their_own(tmp_path: Path) -> None:
    scaler = Scaler(Dynamic())
    train(Recorder([tmp_path / "run.jsonl", tmp_path / "run-{rank}.jsonl"], scaler, rank=1, ranks=2), scaler, 1)
    assert [header.ranks for header in headers(tmp_path / "run-1.jsonl")] == [2]
    assert not (tmp_path / "run.jsonl").exists()
