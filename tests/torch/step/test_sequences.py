"""Whatever a user does, in whatever order: a clear error, a skipped step that had a reason, or the right update."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.helpers import INF, NAN, poison
from tests.torch.window.test_retry import narrow
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

LR = 0.5
NAMES = ("a", "b")

Coefficients = tuple[float | None, float | None]
"""How often each weight is in a loss; None where it is not in it at all."""

coefficients: st.SearchStrategy[Coefficients] = st.sampled_from([(1.0, None), (None, 2.0), (3.0, -1.0), (0.5, 0.25)])
chosen = st.sampled_from([("a",), ("b",), ("a", "b")])

ACTIONS = st.one_of(
    st.tuples(st.just("scale"), coefficients),
    st.tuples(st.just("backward"), coefficients),
    st.tuples(st.just("backward"), coefficients),
    st.tuples(st.just("late"), st.integers(0, 3)),
    st.tuples(st.just("retry"), coefficients, st.sampled_from([16.0, 4.0, -1.0])),
    st.tuples(st.just("poison"), st.sampled_from(NAMES), st.sampled_from([INF, NAN])),
    st.tuples(st.just("clear"), chosen, st.booleans()),
    st.tuples(st.just("clear"), st.just(NAMES), st.just(True)),
    st.tuples(st.just("step"), chosen, st.sampled_from([None, None, 1.0])),
    st.tuples(st.just("step"), chosen, st.sampled_from([None, None, 1.0])),
    st.tuples(st.just("unscaled"), chosen),
    st.tuples(st.just("load")),
)


class World:
    """Two weights in training, and the same in float64 without any scale."""

    def __init__(self, fused: tuple[bool, bool]) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in NAMES})
        self.optimizers = {
            name: torch.optim.SGD([self.model[name]], lr=LR, fused=fuse)
            for name, fuse in zip(NAMES, fused, strict=True)
        }
        self.scaler = LossScaler(
            self.model, Dynamic(init_scale=8.0, growth_interval=1, min_scale=2.0**-6, max_scale=64.0)
        )
        self.saved = self.scaler.state_dict()
        self.pending: list[tuple[Tensor, Coefficients]] = []
        self.weights = {name: torch.zeros(2, dtype=torch.float64) for name in NAMES}
        self.true: dict[str, float | None] = dict.fromkeys(NAMES)
        self.stale: set[str] = set()
        self.overflow_noted = False

    def act(self, kind: str, *arguments: Any) -> None:
        getattr(self, f"_{kind}")(*arguments)
        for name in NAMES:
            assert torch.isfinite(self.model[name]).all()
            torch.testing.assert_close(self.model[name].detach().double(), self.weights[name], rtol=1e-5, atol=1e-6)

    def _loss(self, terms: Coefficients) -> Tensor:
        return sum(
            times * self.model[name].sum() for name, times in zip(NAMES, terms, strict=True) if times is not None
        )  # type: ignore[return-value]

    def _added(self, terms: Coefficients) -> None:
        for name, times in zip(NAMES, terms, strict=True):
            if times is not None:
                self.true[name] = (self.true[name] or 0.0) + times

    def _scale(self, terms: Coefficients) -> None:
        self.pending.append((self.scaler.scale(self._loss(terms)), terms))

    def _backward(self, terms: Coefficients) -> None:
        self._or_refuse(lambda: self.scaler.backward(self._loss(terms)), terms)

    def _late(self, index: int) -> None:
        if index < len(self.pending):
            scaled, terms = self.pending.pop(index)
            self._or_refuse(scaled.backward, terms)

    def _retry(self, terms: Coefficients, limit: float) -> None:
        self._or_refuse(lambda: self.scaler.backward(narrow(self._loss(terms), limit), retries=3), terms)

    def _or_refuse(self, run: Any, terms: Coefficients) -> None:
        try:
            run()
        except RuntimeError as error:
            if "begun after `scaler.unscaled(...)`" not in str(error):
                raise
        else:
            self._added(terms)

    def _poison(self, name: str, value: float) -> None:
        if self.model[name].grad is not None:
            poison(self.model[name], value)
            self.stale.discard(name)  # any write in place looks like clearing; what was poisoned is skipped instead

    def _clear(self, names: tuple[str, ...], set_to_none: bool) -> None:
        for name in names:
            self.optimizers[name].zero_grad(set_to_none=set_to_none)
            self.true[name] = None if set_to_none or self.true[name] is None else 0.0
            self.stale.discard(name)

    def _unscaled(self, names: tuple[str, ...]) -> None:
        bad = self._any_bad(names)
        try:
            with self.scaler.unscaled(*(self.optimizers[name] for name in names)):
                pass
        except RuntimeError as error:
            self._refused(error)
        else:
            self.overflow_noted |= bad

    def _any_bad(self, names: tuple[str, ...]) -> bool:
        grads = [self.model[name].grad for name in names]
        return any(not torch.isfinite(grad).all() for grad in grads if grad is not None)

    def _load(self) -> None:
        self.scaler.load_state_dict(self.saved)
        self._all_become_stale()

    def _all_become_stale(self) -> None:
        self.overflow_noted = False
        self.stale = {name for name in NAMES if self.model[name].grad is not None}

    def _refused(self, error: RuntimeError) -> None:
        texts = (
            "none was scaled",
            "no backward pass has been run",
            "Gradients from before",
            "the same `unscaled(...)`",
        )
        assert any(text in str(error) for text in texts), error
        if "Gradients from before" in str(error):
            self._all_become_stale()

    def _step(self, names: tuple[str, ...], clip_norm: float | None) -> None:
        held = [name for name in names if self.model[name].grad is not None]
        bad = self.overflow_noted or self._any_bad(names)
        try:
            result = self.scaler.step(*(self.optimizers[name] for name in names), clip_norm=clip_norm)
        except RuntimeError as error:
            self._refused(error)
            return
        assert not self.stale & set(held)
        assert result.skipped() is (bad or not held)
        if not result.skipped():
            norm = sum(2 * (self.true[name] or 0.0) ** 2 for name in held) ** 0.5
            factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
            for name in held:
                self.weights[name] -= LR * factor * (self.true[name] or 0.0)
        self._all_become_stale()


@pytest.mark.not_simulated("errors in hooks, which torch loses on a device in Python")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions=st.lists(ACTIONS, max_size=30), fused=st.tuples(st.booleans(), st.booleans()))
def test_no_sequence_of_calls_corrupts_the_weights(actions: list[tuple[Any, ...]], fused: tuple[bool, bool]) -> None:
    world = World(fused)
    for action in actions:
        world.act(*action)
