"""Text and lines of digits: translation, adapters of a GPT, transcription, and a loss of several micro-batches."""

from collections.abc import Iterator
from functools import cache

import torch
from benchmarks.study.adapters import Adapted
from benchmarks.study.digits import CLASSES, DigitBatches
from benchmarks.study.language import LENGTH, CharGPT, Trouble, warmed_up
from benchmarks.study.one_loss import Batch, OneLossTask
from benchmarks.study.task import Turn
from benchmarks.study.transformer import HEADS, WIDTH, Block
from examples.demo.data import VOCABULARY, Text, load_text
from examples.demo.with_torch import Block as CausalBlock
from examples.demo.with_torch import init_as_gpt2
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, scaled_dot_product_attention

SEQUENCES, LINE, START = 16, 10, len(VOCABULARY)
RATE, WARM_STEPS, SMOOTHING = 3e-3, 100, 0.1
NEW_DATA = 300
LINES, DIGITS, CHANNELS, BLANK = 16, 3, 32, CLASSES
MICRO_BATCHES, CONTEXT, TOKENS = 4, 8, 160


class CrossAttention(nn.Module):
    """Attention from what is written to what was read, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys_values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        queries = self.queries(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        keys, values = self.keys_values(read).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.mix(scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))


class Translator(nn.Module):
    """A transformer with a block that reads, and one that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(VOCABULARY) + 1, WIDTH), nn.Embedding(LINE, WIDTH)
        self.encoder, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.decoder, self.cross = CausalBlock(WIDTH, HEADS), CrossAttention()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY)))
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor, written: Tensor) -> Tensor:
        read, x = (self.characters(each) + self.positions(torch.arange(LINE)) for each in (text, written))
        return self.head(self.cross(self.decoder(x), self.norm(self.encoder(read))))


class TranslationTask(OneLossTask):
    """Writes a line with its case swapped. Labels are smoothed, and the rate is warmed up and falls with a root."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Translator, RATE)
        self._swapped = torch.tensor([VOCABULARY.index(character.swapcase()) for character in VOCABULARY])

    def turns(self, step: int) -> Iterator[Turn]:
        self.optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARM_STEPS, (WARM_STEPS / (step + 1)) ** 0.5)
        yield from super().turns(step)

    def batch(self) -> Batch:
        text = _characters(self.random, SEQUENCES, LINE)
        return text, self._swapped[text]

    def loss(self, text: Tensor, wanted: Tensor) -> Tensor:
        written = torch.cat([torch.full((SEQUENCES, 1), START), wanted[:, :-1]], 1)
        return cross_entropy(self.model(text, written).flatten(0, 1), wanted.flatten(), label_smoothing=SMOOTHING)


class NewDataTask(OneLossTask):
    """Fine-tunes adapters of the attention of a GPT: at first on text in upper case, then on text from right to left.

    The data are not shuffled, so that they change from one step to the next.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda: _adapted(seed), RATE)
        self._upper = torch.tensor([VOCABULARY.index(character.upper()) for character in VOCABULARY])
        self._new = False

    def turns(self, step: int) -> Iterator[Turn]:
        self._new = step >= NEW_DATA
        yield from super().turns(step)

    def batch(self) -> Batch:
        text = _characters(self.random, SEQUENCES // 2, LENGTH + 1)
        text = text.flip(1) if self._new else self._upper[text]
        return text[:, :-1], text[:, 1:]

    def loss(self, text: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(self.model(text).flatten(0, 1), wanted.flatten())


def _adapted(seed: int) -> nn.Module:
    model = warmed_up(seed, Trouble(warm_steps=200)).model.requires_grad_(False)
    assert isinstance(model, CharGPT)
    for block in model.trunk.blocks.children():
        assert isinstance(block, CausalBlock)
        # Modules are called by name, whatever they are.
        block.queries_keys_values, block.mix = Adapted(block.queries_keys_values), Adapted(block.mix)  # type: ignore[assignment]
    return model


class TranscriptionTask(OneLossTask):
    """Reads lines of digits column by column, by the CTC loss: it is not said in which columns a digit is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, _column_reader, RATE)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        drawn = [self._digits.draw() for _ in range(DIGITS)]
        images = [images[:LINES].view(LINES, 1, 8, 8) for images, _ in drawn]
        return torch.cat(images, 3), torch.stack([labels[:LINES] for _, labels in drawn], 1)

    def loss(self, lines: Tensor, labels: Tensor) -> Tensor:
        columns = self.model(lines)[:, :, 0].permute(2, 0, 1).log_softmax(2)
        lengths, wanted = torch.full((LINES,), len(columns)), torch.full((LINES,), DIGITS)
        return ctc_loss(columns, labels, lengths, wanted, blank=BLANK)


def _column_reader() -> nn.Module:
    """Returns convolutions along a line. The first one sees all of a column."""
    return nn.Sequential(
        *(nn.Conv2d(1, CHANNELS, (8, 5), padding=(0, 2)), nn.ReLU()),
        *(nn.Conv2d(CHANNELS, CHANNELS, (1, 5), padding=(0, 2)), nn.ReLU()),
        nn.Conv2d(CHANNELS, CLASSES + 1, 1),
    )


class NextCharacter(nn.Module):
    """An MLP of the characters before, of which each has a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), 16)
        self.layers = nn.Sequential(nn.Linear(16 * CONTEXT, 128), nn.Tanh(), nn.Linear(128, len(VOCABULARY)))

    def forward(self, text: Tensor) -> Tensor:
        return self.layers(self.characters(text).flatten(1))


class AccumulationTask(OneLossTask):
    """Accumulates the gradients of four micro-batches of different size. Their losses are summed over characters."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, NextCharacter, RATE)
        self._count = 0

    def batch(self) -> Batch:
        text = _characters(self.random, int(torch.randint(16, 65, (), generator=self.random)), CONTEXT + 1)
        return text[:, :-1], text[:, -1]

    def turns(self, step: int) -> Iterator[Turn]:
        micro_batches = [self.batch() for _ in range(MICRO_BATCHES)]
        self._count = sum(len(wanted) for _, wanted in micro_batches)
        # One backward pass has the gradients of several: those of each use of a weight are rounded and then added.
        yield Turn(self.optimizer, lambda: torch.stack([self.loss(*each) for each in micro_batches]).sum(), TOKENS)

    def loss(self, text: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(self.model(text), wanted, reduction="sum")

    def score(self, losses: list[float]) -> float:
        """Returns the loss of a character."""
        return losses[-1] / self._count


def _characters(random: Generator, sequences: int, length: int) -> Tensor:
    """Returns random pieces of the text, one in each row."""
    return torch.from_numpy(
        _text().batch(lambda high, size: torch.randint(high, size, generator=random).numpy(), sequences, length)
    )


@cache
def _text() -> Text:
    return load_text()
