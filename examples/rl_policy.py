"""A small language model as a policy, sampled as inference engines do it: token by token, with a key-value cache."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

SEQUENCES, LENGTH, TOKENS, WIDTH, HEADS = 32, 16, 32, 64, 4
START = TOKENS
"""What every sequence begins with; it is never sampled."""

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of a block, one pair for each position so far."""


class Block(nn.Module):
    """Attention, then two layers on each position."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            cache.append((key, value))
            key, value = (torch.cat(so_far, dim=2) for so_far in zip(*cache, strict=True))
        attended = scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.before_layers(x))))


class Policy(nn.Module):
    """Tokens to the log-probabilities of the next ones, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None, first: int = 0) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(first, first + tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x, caches[number] if caches is not None else None)
        return self.head(self.norm(x)).float().log_softmax(dim=-1)


@torch.no_grad()
def rollout(policy: Policy) -> tuple[Tensor, Tensor]:
    """Returns sampled sequences, and the log-probability that each of their tokens was sampled with."""
    caches: list[Cache] = [[] for _ in policy.blocks]
    tokens, sampled_with = [torch.full((SEQUENCES, 1), START)], []
    for position in range(LENGTH):
        each = policy(tokens[-1], caches, position)[:, -1]
        tokens.append(torch.multinomial(each.exp(), 1))
        sampled_with.append(each.gather(1, tokens[-1]))
    return torch.cat(tokens, dim=1), torch.cat(sampled_with, dim=1)


def log_probabilities(policy: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the log-probability of each sampled token, from one pass over whole sequences, as in training."""
    return policy(tokens[:, :-1]).gather(2, tokens[:, 1:, None])[..., 0]


def rewards(tokens: Tensor) -> Tensor:
    """Returns 1 for each token that is one more than the token before it."""
    before, after = tokens[:, :-1], tokens[:, 1:]
    return torch.where(before == START, 0.0, (after == (before + 1) % TOKENS).float())


def check_ratios(log_ratios: Tensor, limit: float = 0.25) -> None:
    """Raises if an importance ratio of unchanged weights is further from 1 than `limit`, or not finite.

    The optimizer has not moved since the rollout, so that all of the difference is rounding, or a fault: weights that
    the sampler did not get, another temperature, a mask that is off by one.
    """
    worst = float(log_ratios.detach().expm1().abs().max())
    if not worst <= limit:
        raise RuntimeError(
            f"Importance ratios of unchanged weights must be within {limit} of 1. Received: one that is off by "
            f"{worst:.3g}. Compare weights and sampling settings of the inference engine with those of training."
        )


def save_parts(parts: Sequence[Any]) -> bytes:
    """Returns a checkpoint: the state of each part, and that of the random numbers."""
    torch.save([*(part.state_dict() for part in parts), torch.get_rng_state()], file := io.BytesIO())
    return file.getvalue()


def load_parts(parts: Sequence[Any], saved: bytes) -> None:
    """Loads what `save_parts` has returned."""
    *states, random_numbers = torch.load(io.BytesIO(saved), weights_only=True)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random_numbers)
