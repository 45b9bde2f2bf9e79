"""A small char-GPT in two kinds of arithmetic, and its batches.

`ROUNDED` is a usual one: softmax, LayerNorm, GELU. In `EXACT` every activation and every gradient is a small whole
number times a power of two, so that sums do not depend on their order: a model that is spread over ranks has the same
bits as a whole one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 16, 4, 8, 2, 2
BATCH = 4
"""Sequences of a step, over all ranks."""


class Signs(torch.autograd.Function):
    """The signs of weights, whose gradient is passed on to the weights unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def signs(weight: Tensor) -> Tensor:
    return Signs.apply(weight)  # type: ignore[return-value]


def bounded(x: Tensor) -> Tensor:
    """Returns `x` within [-1, 1], so that products of products stay small."""
    return x.clamp(-1.0, 1.0)


class SignLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, signs(self.weight))


class SignEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, signs(self.weight))


class SignGain(nn.Module):
    """In the place of LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return bounded(x * signs(self.weight))


def hinge(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over all positions of the distance of each logit from the right side of a margin."""
    wanted = 2.0 * F.one_hot(targets, VOCABULARY) - 1.0
    return F.relu(4.0 - wanted * logits).sum(-1).mean()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def causal(scores: Tensor) -> Tensor:
    """Returns which positions each position may look at."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


@dataclass(frozen=True)
class Arithmetic:
    """What the model computes with.

    Attributes:
        linear, embedding, norm: types of layers.
        project: applied to queries, keys, values and what attention returns.
        attend: weights of values from scores.
        activate: inside of the MLP.
        loss: of logits and targets.
    """

    linear: Callable[..., nn.Linear]
    embedding: Callable[..., nn.Embedding]
    norm: Callable[..., nn.Module]
    project: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor], Tensor]
    activate: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


EXACT = Arithmetic(
    linear=SignLinear,
    embedding=SignEmbedding,
    norm=SignGain,
    project=bounded,
    attend=lambda scores: bounded(scores) * causal(scores),
    activate=bounded,
    loss=hinge,
)
ROUNDED = Arithmetic(
    linear=nn.Linear,
    embedding=nn.Embedding,
    norm=nn.LayerNorm,
    project=lambda x: x,
    attend=lambda scores: (0.5 * scores).masked_fill(~causal(scores), -torch.inf).softmax(-1),
    activate=F.gelu,
    loss=cross_entropy,
)


class Attention(nn.Module):
    def __init__(self, kind: Arithmetic) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (kind.linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = kind.linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Tensor parallelism leaves some of the heads on each rank.
        q, k, v = (
            self.kind.project(layer(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = self.kind.attend(q @ k.transpose(2, 3))
        return self.out(self.kind.project(weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, kind: Arithmetic) -> None:
        super().__init__()
        self.kind = kind
        self.up = kind.linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = kind.linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.kind.activate(self.up(x)))


class Block(nn.Module):
    def __init__(self, kind: Arithmetic) -> None:
        super().__init__()
        self.norm1, self.attention = kind.norm(WIDTH), Attention(kind)
        self.norm2, self.mlp = kind.norm(WIDTH), MLP(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The model, or one stage of a pipeline, which has the others' parts removed but keeps their names."""

    def __init__(self, kind: Arithmetic, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens: nn.Module | None = kind.embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(index): Block(kind) for index in range(BLOCKS)})
        self.norm: nn.Module | None = kind.norm(WIDTH)
        self.head: nn.Module | None = kind.linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


@functools.cache
def tokens_of(step: int) -> Tensor:
    """Returns the characters of a step's batch: each follows from the one before, with some noise."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    strides = 3 + torch.randint(2, (BATCH, LENGTH), generator=generator)
    return torch.cat([first, first + strides.cumsum(1)], 1) % VOCABULARY


def batch_of(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of one of `parts` equal parts of a step's batch."""
    tokens = tokens_of(step).chunk(parts)[part]
    # Pipelines of torch 2.6 refuse an input whose strides are not those of the first one's copy.
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
