"""Q-learning: the values of actions, by the values that a copy of the network has found for the next state."""

import copy
from collections.abc import Iterator

import torch
from benchmarks.study.digits import layers
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Tensor
from torch.nn.functional import mse_loss

POINTS, LENGTH = 64, 10
ACTIONS = torch.tensor([-0.25, 0.0, 0.25])
FAR, DISCOUNT, COPIED = 3.0, 0.95, 50


class QLearningTask(OneLossTask):
    """Pushes a moving point left or right; the cost of a step is the square of its distance.

    The copy is renewed every 50 steps. Values grow from zero to those of a whole episode, and so do gradients.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: layers((2, 64, 64, len(ACTIONS))), 2e-3)
        self._copy = copy.deepcopy(self.model)
        self._starts = self._states()
        self._cost = 0.0

    def turns(self, step: int) -> Iterator[Turn]:
        if step % COPIED == 0:
            self._copy.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            self._cost = self._episodes()
        yield from super().turns(step)

    def batch(self) -> Batch:
        states = self._states()
        actions = torch.randint(len(ACTIONS), (POINTS, 1), generator=self.random)
        after = _pushed(states, ACTIONS[actions])
        with torch.no_grad():
            costs = after[:, :1].square() + DISCOUNT * self._copy(after).amin(1, keepdim=True)
        return states, torch.cat([actions, costs], 1)

    def loss(self, states: Tensor, targets: Tensor) -> Tensor:
        actions, costs = targets.split(1, 1)
        return mse_loss(self.model(states).float().gather(1, actions.long()), costs)

    def score(self, losses: list[float]) -> float:
        """Returns the cost of an episode with the best actions, before the step."""
        return self._cost

    def _states(self) -> Tensor:
        return torch.randn(POINTS, 2, generator=self.random) * torch.tensor([1.5, 0.5])

    def _episodes(self) -> float:
        states, cost = self._starts, 0.0
        for _ in range(LENGTH):
            states = _pushed(states, ACTIONS[self.model(states).argmin(1, keepdim=True)])
            cost += float(states[:, 0].square().mean())
        return cost


def _pushed(states: Tensor, push: Tensor) -> Tensor:
    """Returns the places and the speeds after a push. No place is farther than a wall."""
    place, speed = states.split(1, 1)
    speed = speed + push
    return torch.cat([(place + speed).clamp(-FAR, FAR), speed], 1)
