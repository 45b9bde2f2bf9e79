"""A small GPT that learns to write Python, character by character: what the examples on many ranks train."""

import argparse
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

SEQUENCES, LENGTH, WIDTH, HEAD_WIDTH = 4, 32, 48, 12

TEXT = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "ignore")))


class Embedding(nn.Module):
    """Characters and their positions to features."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.characters(text) + self.positions(torch.arange(LENGTH))


class Block(nn.Module):
    """Attention, then two layers on each position. Tensor parallel ranks have some of the heads each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        heads = (part(normed).unflatten(-1, (-1, HEAD_WIDTH)) for part in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.before_layers(x))))


class Head(nn.Module):
    """Features to the logits of the next character, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).float()


def char_gpt() -> nn.Sequential:
    """Returns the same new model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), Block(), Block(), Head())


def batches(steps: int, seed: int) -> list[Tensor]:
    """Returns rows of text, another batch for each step. Ranks with other data pass another seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(TEXT) - LENGTH, (steps, SEQUENCES, 1), generator=generator)
    return list(TEXT[starts + torch.arange(LENGTH + 1)])


def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
    """Returns the loss of the next characters."""
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def check_same(weights: Iterable[Tensor], state: dict[str, Any]) -> None:
    """Raises unless every rank has the same weights, and the same state of its scaler."""
    own = [weight.detach().tolist() for weight in weights], state
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if any(other != own for other in gathered):
        raise RuntimeError("The ranks have different weights, or different scales.")
