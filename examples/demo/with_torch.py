"""The demo in PyTorch: a deep CNN and a GPT in real FP16 autocast and emulated FP8, on a GPU or on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from examples.demo.data import (
    AHEAD_WEIGHT,
    DEPTH,
    HEADS,
    LANGUAGE,
    LENGTH,
    TEXT_LEARNING_RATE,
    VOCABULARY,
    WIDTH,
    Digits,
    Text,
    gpt_scores,
    load_digits,
    load_text,
)
from examples.demo.loop import FP8_RECIPES, RECIPES, Demo, Experiment, Recipe, Trainer, Workers
from examples.demo.runs import Array, Gradients, Step, Subject
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, one_hot, scaled_dot_product_attention

from gradscale import FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from gradscale.torch import LossScaler, emulate, watch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 13
CHANNELS = 16
CNN_BATCH = 32
INIT_STD = 0.02
WATCH_EVERY = 50


class Losses(NamedTuple):
    """The losses of one batch.

    Attributes:
        trained: the total loss, which is differentiated.
        shown: the part of it that is plotted.
    """

    trained: Tensor
    shown: Tensor


class Task(Protocol):
    """A model, its data and its losses; the same for every recipe."""

    subject: Subject
    learning_rate: float

    def model(self) -> nn.Module:
        """Returns a new model on the task's device, drawn from torch's random numbers."""
        ...

    def batch(self, generator: torch.Generator) -> Any:
        """Returns a random batch."""
        ...

    def losses(self, model: nn.Module, batch: Any) -> Losses:
        """Returns the losses of a batch, in float32."""
        ...

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Returns the subject's scores on the test data."""
        ...


class DigitsTask:
    """Thirteen convolutions in a row, as torch initializes them, with no normalization and no residuals.

    That is why FP16 fails: the loss is a mean over 320 outputs, each layer passes on less than half of the gradient,
    and before it reaches the first layers it is below the smallest FP16 number. FP32 has the range for it, and Adam's
    update does not depend on how small a gradient is.
    """

    subject = Subject(
        model="cnn",
        loss_title="Loss of the CNN",
        scores={"accuracy": ".1%"},
        caption="a deep CNN reads handwritten digits",
    )
    learning_rate = 1.5e-3

    def __init__(self, digits: Digits, device: torch.device) -> None:
        self._device = device
        self._images, self._test_images = _as_images(digits.images, device), _as_images(digits.test_images, device)
        self._labels = torch.as_tensor(digits.labels, device=device)
        self._test_labels = torch.as_tensor(digits.test_labels, device=device)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1), nn.LeakyReLU(0.1)]
        for _ in range(LAYERS - 1):
            layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.LeakyReLU(0.1)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * CHANNELS, 10))
        # FP16 convolutions on a CPU take two thirds of the time in this layout.
        return model.to(self._device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._images), (CNN_BATCH,), generator=generator).to(self._device)
        return self._images[chosen], self._labels[chosen]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Losses:
        images, labels = batch
        loss = mse_loss(model(images).float(), one_hot(labels, 10).float())
        return Losses(loss, loss)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        guesses = model(self._test_images).argmax(dim=1)
        return {"accuracy": float((guesses == self._test_labels).float().mean())}


def _as_images(rows: Any, device: torch.device) -> Tensor:
    """Returns rows of 64 pixels as images of one channel, with mean 0 and deviation 1 over all of them."""
    images = torch.as_tensor(rows, device=device).view(-1, 1, 8, 8)
    return (images - images.mean()) / images.std()


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


class TwoHeads(nn.Module):
    """A GPT with a head for the next character and one for the character after it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT(len(VOCABULARY), LENGTH, WIDTH, HEADS, DEPTH)
        self.next = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.ahead = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        self.apply(init_as_gpt2)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the next character, and those of the one after it, at each position."""
        features = self.trunk(text)
        return self.next(features), self.ahead(features)


class LanguageTask:
    """Predicts the next character and, at a small weight, the one after it."""

    subject = LANGUAGE
    learning_rate = TEXT_LEARNING_RATE

    def __init__(self, text: Text, device: torch.device) -> None:
        self._text = text
        self._device = device

    def model(self) -> nn.Module:
        return TwoHeads().to(self._device)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.from_numpy(self._text.batch(draw_from(generator))).to(self._device)

    def losses(self, model: nn.Module, batch: Tensor) -> Losses:
        loss, ahead = _head_losses(model, batch)
        return Losses(loss + AHEAD_WEIGHT * ahead, ahead)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        return gpt_scores(*map(float, _head_losses(model, torch.from_numpy(self._text.test_rows()).to(self._device))))


def draw_from(generator: torch.Generator) -> Callable[[int, tuple[int, ...]], Array]:
    """Returns a function that draws the starts of `Text.batch` from torch's random numbers."""
    return lambda high, size: torch.randint(high, size, generator=generator).numpy()


def _head_losses(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy of each head over all positions."""
    next_logits, ahead_logits = model(rows[:, :-2])
    return _cross_entropy(next_logits, rows[:, 1:-1]), _cross_entropy(ahead_logits, rows[:, 2:])


def _cross_entropy(logits: Tensor, characters: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), characters.flatten())


TASKS: dict[str, Callable[[int], Task]] = {
    DigitsTask.subject.model: lambda seed: DigitsTask(load_digits(seed), DEVICE),
    LanguageTask.subject.model: lambda _: LanguageTask(load_text(), DEVICE),
}
"""Loads a task by a seed."""

Context = Callable[[], AbstractContextManager[Any]]

CONTEXTS: dict[Format, Context] = {
    FP32: nullcontext,
    FP16: lambda: torch.autocast(DEVICE.type, dtype=torch.float16),
    # As in FP8 training: E4M3 values that saturate, E5M2 gradients that overflow.
    FP8_E5M2: lambda: emulate(FP8_E4M3, FP8_E5M2, saturate=True),
}
"""The context of the forward pass. Parameters are always float32."""


@dataclass(frozen=True)
class TorchTrainer:
    """Trains the model of a task.

    Attributes:
        context: the context of the forward pass.
        generator: draws the batches.
        loss: which of the task's losses a step reports.
    """

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    context: Context
    generator: torch.Generator
    loss: Literal["shown", "trained"] = "shown"

    def step(self, sample: bool) -> Step:
        batch = self.task.batch(self.generator)
        with self.context():
            losses = self.task.losses(self.model, batch)
        self.scaler.note(loss=losses.trained)
        self.scaler.backward(losses.trained)
        grads = self._gradients(batch) if sample else None
        result = self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        return Step(float(getattr(losses, self.loss).detach()), float(result.scale), result.skipped(), grads)

    def scores(self) -> dict[str, float]:
        return self.task.scores(self.model)

    def _gradients(self, batch: Any) -> Gradients:
        parameters = list(self.model.parameters())
        with _activation_grads(self.model) as activations:
            reference = torch.autograd.grad(self.task.losses(self.model, batch).trained, parameters)
        kept = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return Gradients(_arrays(kept), _arrays(reference), _arrays(activations))


def load(model: str, seed: int) -> Callable[[Recipe], Trainer]:
    """Returns a function that makes a trainer for the model of this name."""
    return partial(_make, TASKS[model](seed), seed)


def _make(task: Task, seed: int, recipe: Recipe) -> TorchTrainer:
    model = initial_model(task, seed)
    path = recipe.record and recipe.record.format(model=task.subject.model)
    scaler, generator = LossScaler(model, recipe.policy, record=path), torch.Generator().manual_seed(seed)
    if path:
        watch(model, scaler, every=WATCH_EVERY)  # into the record
    return TorchTrainer(task, model, adam(task, model), scaler, CONTEXTS[recipe.format], generator)


def initial_model(task: Task, seed: int) -> nn.Module:
    """Returns the initial model of a seed. Must be called in one thread: threads share torch's random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task.model()


def adam(task: Task, model: nn.Module, eps: float = 1e-8) -> torch.optim.Optimizer:
    """Returns the optimizer of a task's model."""
    return torch.optim.Adam(model.parameters(), lr=task.learning_rate, eps=eps, fused=True)


@contextmanager
def workers() -> Iterator[Workers]:
    """Yields as many threads as torch would use for one operation, each with one core; a single one on accelerators."""
    # FP16 operations on a CPU are slow, and small here: splitting one between two cores gains nothing, and is much
    # slower on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Workers(threads if DEVICE.type == "cpu" else 1) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _arrays(tensors: Any) -> list[Array]:
    return [tensor.cpu().numpy() for tensor in tensors]


@contextmanager
def _activation_grads(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that fills with the gradients of the inputs and outputs of the layers that FP16 computes."""
    grads: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        for activation in (*inputs, output):
            if activation.requires_grad:
                activation.register_hook(grads.append)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    yield grads
    for handle in handles:
        handle.remove()


DEMO = Demo(
    # Without the static scale, which the other frameworks show: two models and FP8 take long enough.
    (*(recipe for recipe in RECIPES if recipe.policy != "static"), *FP8_RECIPES),
    [
        Experiment(subject, steps, partial(load, subject.model), seconds)
        for subject, steps, seconds in ((DigitsTask.subject, 400, 30.0), (LanguageTask.subject, 300, 25.0))
    ],
    workers,
)
