"""Copies and pickles of a scaler: between steps they work, in the middle of one they raise."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, loss_of, poison, same, small_model, train_step, weights

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_copy_goes_on_like_the_original(kind: str, steps: int) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, Dynamic(init_scale=256.0, growth_interval=2, hysteresis=2), max_consecutive_skips=9)
    scaler.protect_buffers()
    for step in range(steps):
        train_step(scaler, model, optimizer, step, bad=INF if step == 1 else None)
    twin_model, twin_optimizer, twin = COPIES[kind]((model, optimizer, scaler))
    assert twin.state_dict() == scaler.state_dict()
    assert twin.last is None
    for step in range(4):
        for one in ((scaler, model, optimizer), (twin, twin_model, twin_optimizer)):
            train_step(*one, step, bad=INF if step == 2 else None)
    assert same(weights(model), weights(twin_model))
    assert twin.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_names_the_parameters_of_its_own_model(kind: str) -> None:
    model = small_model()
    twin_model, twin = COPIES[kind]((model, LossScaler(model, Dynamic())))
    twin.backward(loss_of(twin_model))
    poison(twin_model[2].bias)
    assert [c.name for c in twin.step(torch.optim.SGD(twin_model.parameters())).culprits()] == ["2.bias"]


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_in_the_middle_of_a_step_is_refused(kind: str) -> None:
    model = small_model()
    scaler = LossScaler(model)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"between steps only.*Do it after `scaler\.step\(\.\.\.\)`, or save"):
        COPIES[kind](scaler)
    assert not scaler.step(torch.optim.SGD(model.parameters())).skipped()
