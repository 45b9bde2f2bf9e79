"""Trainings with one fault each: functions that return what `gradscale doctor` takes."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.torch.probing.models import Attention, Block, Stack, rows
from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], Tensor]
Made = tuple[nn.Module, Iterable[Any], LossFn, torch.optim.Optimizer]


def half_pass(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the output of a forward pass in FP16 autocast, as float32."""
    with torch.autocast("cpu", dtype=torch.float16):
        return model(x).float()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return half_pass(model, x).square().mean()


def adamw(model: nn.Module, lr: float = 1e-3, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def made(
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    loss_fn: LossFn = squares,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Made:
    """Returns a sound training, but for what is given."""
    torch.manual_seed(0)
    model = model or Stack(Block(), Block())
    return model, batches or [rows(seed) for seed in range(20)], loss_fn, optimizer(model)


def in_some(steps: Iterable[int], bad: LossFn, batches: list[Tensor] | None = None, **parts: Any) -> Made:
    """Returns a training whose loss is another one for the batches of some steps, counted from 1."""
    batches = batches or [rows(seed) for seed in range(20)]
    marked = {id(batches[step - 1]) for step in steps}
    return made(None, batches, lambda model, x: (bad if id(x) in marked else squares)(model, x), **parts)


def writing(at: Iterable[int], write: Callable[[Any], object], **parts: Any) -> Made:
    """Returns a training with a bug: before some steps it writes to the weights."""

    def bad(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(model)
        return squares(model, x)

    return in_some(at, bad, **parts)


def sgd(model: nn.Module, lr: float = 1e-3, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def healthy() -> Made:
    return made()


# The table of wrong verdicts.


def nan_batches() -> Made:
    """Every tenth batch holds a NaN."""
    batches = [rows(seed) for seed in range(20)]
    batches[9][0, 0] = batches[19][0, 0] = math.nan
    return made(batches=batches)


def log_of_zero() -> Made:
    """The logarithm of outputs, of which some steps have a zero."""
    return in_some((2, 4, 5, 8, 11, 12, 16, 19), lambda model, x: (half_pass(model, x) * 0).log().mean())


def all_labels_masked() -> Made:
    """Now and then no label is left, and the mean is over none."""

    def masked(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(half_pass(model, x), torch.full((8,), -100))

    return in_some((3, 7, 13), masked)


class Gradient(torch.autograd.Function):
    """Returns its input, and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.factor, None


def overflows_now_and_then() -> Made:
    """Every fourth gradient is infinite, whatever the scale, and the loss is finite."""
    return in_some(range(4, 21, 4), lambda model, x: Gradient.apply(squares(model, x), math.inf))  # type: ignore[no-any-return]


def steep_adamw() -> Made:
    """A learning rate a thousand times too high."""
    return made(optimizer=lambda model: adamw(model, lr=1.0))


def half_model() -> Made:
    """`model.half()`, where the eps of 1e-8 of Adam is zero."""
    model = Stack(Block(), Block())
    model.embed.weight.requires_grad_(True)
    # The first input is always 0, and so is the gradient of its weights: 0 / (sqrt(0) + 0).
    batches = [(rows(seed) * torch.tensor([0.0, 1.0, 1.0, 1.0])).half() for seed in range(20)]
    lossy = lambda model, x: model(x).float().square().mean()  # noqa: E731
    return made(model.half(), batches, lossy, lambda model: adamw(model, lr=1e-7, foreach=True))


def state_with(name: str) -> Made:
    """Returns a training that goes on from an optimizer state with an inf, as of a damaged checkpoint."""
    model, batches, loss_fn, optimizer = made()
    squares(model, rows()).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[model.head.weight][name][0, 0] = math.inf  # type: ignore[union-attr,index]
    return model, batches, loss_fn, optimizer


def inf_in_exp_avg() -> Made:
    return state_with("exp_avg")


def inf_in_exp_avg_sq() -> Made:
    return state_with("exp_avg_sq")


def double(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def doubled_weights() -> Made:
    """A bug doubles all weights before each step from the fifth on."""
    return writing(range(5, 21), double)


def doubled_weights_sgd() -> Made:
    """The same, with an optimizer whose updates may be of any size."""
    return writing(range(5, 21), double, optimizer=sgd)


class Words(nn.Module):
    """An embedding, of which one row is out of range, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            self.embed.weight[7] = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def embedding_row() -> Made:
    """One row of an embedding is 1e6, and few batches use it."""
    batches = [torch.tensor([1, 2, 7 if number % 6 == 5 else 3]) for number in range(20)]
    return made(Words(), batches)


def raw_uint16() -> Made:
    """Raw 16-bit pixels: most batches have some that FP16 cannot hold in the first layer."""
    brightness = [1e-3 if number in (4, 11) else 1.0 for number in range(20)]
    return made(batches=[(rows(seed).abs() * 60000 * each).clamp(max=65535) for seed, each in enumerate(brightness)])


def standard_deviation_of_zero() -> Made:
    """Inputs are divided by their standard deviation, which is zero for constant batches."""

    def normed(model: nn.Module, x: Tensor) -> Tensor:
        constant = torch.ones_like(x)
        return squares(model, (constant - constant.mean() + 1) / constant.std())

    return in_some((2, 6, 7), normed)


class Huge(nn.Module):
    """A head behind a function of the user's own, whose gradient is a billion times too large."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Gradient.apply(self.body(x), 1e9))  # type: ignore[no-any-return]


def custom_function() -> Made:
    torch.manual_seed(0)
    return made(Huge())


class DeadRelu(nn.Module):
    """Outputs that are all below zero, before a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        nn.init.constant_(self.body.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x))


def dead_relu() -> Made:
    return made(DeadRelu())


# Ten more.


def masked_row() -> Made:
    """An attention mask that hides a whole row."""

    class Masked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(-1, -2)
            hidden = torch.zeros_like(scores, dtype=torch.bool)
            hidden[2] = True
            return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ x

    return made(Stack(Block(), Masked()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def bad_running_statistics() -> Made:
    """Running statistics of a BatchNorm in evaluation mode that an earlier batch has made NaN."""
    model = Normed().eval()
    model.norm.running_var[1] = math.nan  # type: ignore[index]
    return made(model)


def steep_sgd() -> Made:
    return made(optimizer=lambda model: sgd(model, 300.0, momentum=0.9))


def infinite_hook() -> Made:
    """A hook makes the gradient of one parameter infinite."""
    parts = made()
    parts[0].head.bias.register_hook(lambda grad: grad * math.inf)  # type: ignore[union-attr,operator]
    return parts


def loaded_in_between() -> Made:
    """Weights of another model are copied in after the third step, a thousand times as large."""

    def load(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 300)

    return writing((4,), load)


def exponential() -> Made:
    """A loss with the exponential of a large number, in float32."""
    return made(loss_fn=lambda model, x: (half_pass(model, x) * 1e4).exp().mean())


def norm_at_zero() -> Made:
    """The square root of a sum of squares, of which one is zero: its gradient is not defined there."""
    return made(loss_fn=lambda model, x: ((half_pass(model, x)[:, 0] * 0).square()).sqrt().mean())


def weight_decay() -> Made:
    """A weight decay that turns weights over: 1 - 0.1 * 100 = -9."""
    return made(optimizer=lambda model: sgd(model, 0.1, weight_decay=100.0))


def eps_of_zero() -> Made:
    """Adam without an eps, and a weight whose gradient is zero."""
    batches = [rows(seed) * torch.tensor([0.0, 1.0, 1.0, 1.0]) for seed in range(20)]
    return made(batches=batches, optimizer=lambda model: adamw(model, eps=0.0))


def nan_written() -> Made:
    """A bug writes a NaN into a weight before the sixth step."""
    return writing((6,), lambda model: model.head.bias.fill_(math.nan))


def large_sum() -> Made:
    """No fault: a loss that is a sum, whose gradients need a scale below 1."""
    return made(loss_fn=lambda model, x: (half_pass(model, x) * 3e3).square().sum())


def steep_adamw_in_attention() -> Made:
    """The same learning rate in a model whose forward pass overflows before weights are 30 times as large."""
    model = Stack(Block(), Attention(gain=20.0))
    return made(model, [rows(seed) for seed in range(20)], squares, lambda model: adamw(model, lr=1.0))


def sparse() -> Made:
    """No fault: an embedding with sparse gradients."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    return made(Looked(), [torch.tensor([1, 2, 3])] * 20, squares, sgd)
