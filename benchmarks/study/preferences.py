"""Fine-tuning of a small language model by rewards and by preferences, as in RLHF: PPO and DPO."""

import copy
from collections.abc import Iterator
from functools import cache

import torch
from benchmarks.study.digits import layers
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, mse_loss

TOKENS, LENGTH, BEFORE, WIDTH = 12, 8, 3, 16
TEXTS = 32
CLIP, EPOCHS, PENALTY, VALUE_WEIGHT, ENTROPY_WEIGHT, DECAY = 0.2, 4, 0.02, 0.5, 0.01, 0.95
BETA = 0.1


class Writer(nn.Module):
    """Returns the logits of each token of a text, and the value of what is written before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = layers(((BEFORE + 1) * WIDTH, 64, 64, TOKENS + 1))

    def forward(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([torch.full((len(texts), BEFORE), TOKENS), texts[:, :-1]], 1)
        before = self.tokens(padded.unfold(1, BEFORE, 1)).flatten(2)
        positions = self.positions(torch.arange(LENGTH)).expand(len(texts), -1, -1)
        logits, values = self.layers(torch.cat([before, positions], 2)).float().split([TOKENS, 1], 2)
        return logits, values[..., 0]

    def log_chances(self, texts: Tensor) -> Tensor:
        """Returns the logarithm of the chance of each token."""
        return self(texts)[0].log_softmax(2).gather(2, texts[..., None])[..., 0]

    @torch.no_grad()
    def write(self, random: Generator) -> Tensor:
        """Returns random texts."""
        texts = torch.zeros(TEXTS, LENGTH, dtype=torch.long)
        for position in range(LENGTH):
            chances = self(texts)[0][:, position].softmax(1)
            texts[:, position] = torch.multinomial(chances, 1, generator=random)[:, 0]
        return texts


def rewards(texts: Tensor) -> Tensor:
    """Returns the share of the tokens of each text that are above the one before."""
    return (texts[:, 1:] > texts[:, :-1]).float().mean(1)


@cache
def _pretrained(seed: int) -> Writer:
    """Returns a writer that was trained in FP32 on random walks, once for all rules."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    writer = Writer()
    optimizer = torch.optim.Adam(writer.parameters(), 3e-3)
    for _ in range(200):
        texts = torch.randint(-2, 3, (TEXTS, LENGTH), generator=random).cumsum(1) % TOKENS
        optimizer.zero_grad()
        cross_entropy(writer(texts)[0].flatten(0, 1), texts.flatten()).backward()
        optimizer.step()
    return writer


class RewardTask:
    """PPO: four steps on each set of texts that the model has written, with clipped ratios, a value and an entropy.

    What is rewarded is the whole text, and a penalty for each token keeps the model close to the one before.
    """

    def __init__(self, seed: int) -> None:
        self._reference = _pretrained(seed)
        self._writer = copy.deepcopy(self._reference)
        self.model: nn.Module = self._writer
        self._random = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, foreach=True)
        self._rollout, self._cost = self._write(), 0.0

    def turns(self, step: int) -> Iterator[Turn]:
        if step % EPOCHS == 0:
            self._rollout = self._write()
            self._cost = 1 - float(rewards(self._rollout[0]).mean())
        rollout = self._rollout
        yield Turn(self._optimizer, lambda: self._loss(*rollout))

    def score(self, losses: list[float]) -> float:
        """Returns what the texts have missed of the reward."""
        return self._cost

    @torch.no_grad()
    def _write(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns texts, the logarithms of their chances, the advantages of their tokens and the returns."""
        texts = self._writer.write(self._random)
        log_chances, values = self._writer.log_chances(texts), self._writer(texts)[1]
        gains = PENALTY * (self._reference.log_chances(texts) - log_chances)
        gains[:, -1] += rewards(texts)
        # Generalized advantage estimation, without a discount.
        advantages, later = torch.zeros(TEXTS, LENGTH), torch.zeros(TEXTS)
        following = torch.cat([values[:, 1:], torch.zeros(TEXTS, 1)], 1)
        for position in reversed(range(LENGTH)):
            later = gains[:, position] + following[:, position] - values[:, position] + DECAY * later
            advantages[:, position] = later
        return texts, log_chances, (advantages - advantages.mean()) / (advantages.std() + 1e-8), advantages + values

    def _loss(self, texts: Tensor, log_chances: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        logits, values = self._writer(texts)
        found = logits.log_softmax(2)
        ratios = (found.gather(2, texts[..., None])[..., 0] - log_chances).exp()
        gain = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        entropy = -(found.exp() * found).sum(2).mean()
        return VALUE_WEIGHT * mse_loss(values, returns) - gain - ENTROPY_WEIGHT * entropy


class PreferenceTask(OneLossTask):
    """DPO: of two texts the better one is to become likelier, against the chances of both before the fine-tuning."""

    def __init__(self, seed: int) -> None:
        self._reference = _pretrained(seed)
        super().__init__(seed, lambda: copy.deepcopy(self._reference), 1e-3)

    def batch(self) -> Batch:
        pairs = torch.stack([self._reference.write(self.random) for _ in range(2)])
        order = rewards(pairs.flatten(0, 1)).view(2, TEXTS).argsort(0, descending=True)
        better, worse = pairs.gather(0, order[..., None].expand_as(pairs)).unbind()
        return better, worse

    def loss(self, better: Tensor, worse: Tensor) -> Tensor:
        return -logsigmoid(BETA * (self._gain(better) - self._gain(worse))).mean()

    def _gain(self, texts: Tensor) -> Tensor:
        assert isinstance(self.model, Writer)
        with torch.no_grad():
            before = self._reference.log_chances(texts).sum(1)
        return self.model.log_chances(texts).sum(1) - before
