"""A policy gradient: REINFORCE on points that are to be pushed to the origin."""

from collections.abc import Iterator

import torch
from benchmarks.study.task import Turn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, EPISODES, LENGTH = 32, 16, 12
PUSH = 0.25
ACTIONS = torch.tensor([-PUSH, 0.0, PUSH])


class ControlTask:
    """Pushes a moving point left or right; the cost of a step is the square of its distance.

    Returns are neither normalized nor averaged over the episode: the largest gradient varies over many binades.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, len(ACTIONS))
        )
        self._random = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, foreach=True)
        self._cost = 0.0

    def turns(self, step: int) -> Iterator[Turn]:
        states, actions, costs = self._episodes()
        self._cost = float(costs.sum(0).mean())
        # The cost from each step on, against its mean over the episodes.
        remaining = costs.flip(0).cumsum(0).flip(0)
        advantage = (remaining - remaining.mean(1, keepdim=True)).flatten()
        yield Turn(self._optimizer, lambda: self._loss(states, actions, advantage))

    def score(self, losses: list[float]) -> float:
        """Returns the cost of an episode."""
        return self._cost

    def _episodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the states, the actions and the costs of the episodes, which run side by side."""
        place = 2 * torch.randn(EPISODES, generator=self._random)
        speed = torch.randn(EPISODES, generator=self._random) / 2
        states, actions, costs = [], [], []
        with torch.no_grad():
            for _ in range(LENGTH):
                states.append(torch.stack([place, speed], 1))
                chances = self.model(states[-1]).softmax(1)
                actions.append(torch.multinomial(chances, 1, generator=self._random)[:, 0])
                speed = speed + ACTIONS[actions[-1]]
                place = place + speed
                costs.append(place**2)
        return torch.cat(states), torch.cat(actions), torch.stack(costs)

    def _loss(self, states: Tensor, actions: Tensor, advantage: Tensor) -> Tensor:
        # The cross entropy is minus the logarithm of the chance: a cost above the mean makes its action less likely.
        return -(cross_entropy(self.model(states), actions, reduction="none") * advantage).sum() / EPISODES
