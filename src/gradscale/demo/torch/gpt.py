"""A small GPT in the style of GPT-2: causal attention, residual blocks with LayerNorm in front, GELU."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

INIT_STD = 0.02


class Block(nn.Module):
    """Attention, then two layers on each position, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self._attend(self.queries_keys_values(self.before_attention(x))))
        return x + self.narrow(gelu(self.widen(self.before_layers(x))))

    def _attend(self, joined: Tensor) -> Tensor:
        queries, keys, values = joined.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Returns a feature vector for each position of a text."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor) -> Tensor:
        positions = self.positions(torch.arange(text.shape[1], device=text.device))
        return self.norm(self.blocks(self.characters(text) + positions))


def init_as_gpt2(module: nn.Module) -> None:
    """Sets the weights of a module to small random numbers and its biases to zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
