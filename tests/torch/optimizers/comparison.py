"""One optimizer with each scaler, beside a run without a scale that leaves out the step to be skipped."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from tests.torch.optimizers.cases import Case
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler

STEPS, BAD = 6, 3
"""How many steps are taken, and which of them has an inf in a gradient."""

SCALE, GROWTH_INTERVAL = 2.0**16, 2
"""The scale grows twice before the overflow, and backs off after it. All of them are powers of two."""

OTHERS = type | FunctionType | MethodType | ModuleType | nn.Module
"""What an optimizer may refer to and does not own."""

OF_SCHEDULERS = "_opt_called"
"""An attribute by which torch's schedulers know whether an optimizer was stepped."""

Contents = list[tuple[str, bytes]]
Backward = Callable[[], Tensor]


class Outcome(NamedTuple):
    """What a run with a scaler was like.

    Attributes:
        held: whether the skipped step changed no weight, no state and no setting of the optimizer.
        exact: whether weights, state and settings are at the end those of the run without a scale, bit for bit.
        refused: the type of an error in place of a run.
    """

    held: bool = False
    exact: bool = False
    refused: str = ""


class Loop:
    """A model and its optimizer, on batches that depend on nothing but the number of the step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = case.model()
        self.optimizer = case.optimizer(self.model)
        self.closure = case.closure

    def loss(self, step: int) -> Tensor:
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        return (self.model(rows) - rows).square().mean()

    def spoil(self) -> None:
        """Puts an inf into a gradient."""
        grad: Any = next(self.model.parameters()).grad
        (grad._values() if grad.is_sparse else grad)[0, 0] = torch.inf

    def contents(self) -> Contents:
        """Returns the bits of all that a step may change."""
        own = {key: value for key, value in vars(self.optimizer).items() if "hook" not in key and key != OF_SCHEDULERS}
        found = [*_contents("model", list(self.model.parameters()), set()), *_contents("optimizer", own, set())]
        return [(path, bits) for path, bits in found if not path.endswith(".func_evals")]  # LBFGS counts in a skip, too


def unscaled(case: Case) -> Contents:
    """Returns what a run without a scale ends with."""
    loop = Loop(case)
    for step in range(STEPS):
        if step == BAD:
            continue

        def closure(step: int = step) -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss(step)
            loss.backward()
            return loss

        if loop.closure:
            loop.optimizer.step(closure)
        else:
            closure()
            loop.optimizer.step()
    return loop.contents()


def compared(case: Case, kind: str) -> Outcome:
    """Returns how a run with a scaler, one of `KINDS`, compares to the one without."""
    expected, loop = unscaled(case), Loop(case)
    step_of, held = KINDS[kind](loop), False
    for step in range(STEPS):
        before = loop.contents()
        try:
            step_of(step)
        except (RuntimeError, TypeError, ValueError) as error:
            return Outcome(refused=type(error).__name__)
        if step == BAD:
            held = loop.contents() == before
    return Outcome(held, loop.contents() == expected)


def with_loss_scaler(loop: Loop) -> Callable[[int], None]:
    scaler = LossScaler(loop.model, Dynamic(init_scale=SCALE, growth_interval=GROWTH_INTERVAL))

    def step_of(step: int) -> None:
        if loop.closure:
            factor = torch.inf if step == BAD else 1.0
            loop.optimizer.step(scaler.closure(lambda: loop.loss(step) * factor, loop.optimizer))
            return
        loop.optimizer.zero_grad()
        scaler.backward(loop.loss(step))
        if step == BAD:
            loop.spoil()
        scaler.step(loop.optimizer)

    return step_of


def with_grad_scaler(kind: Callable[..., Any]) -> Callable[[Loop], Callable[[int], None]]:
    def steps_of(loop: Loop) -> Callable[[int], None]:
        scaler = kind("cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL)

        def step_of(step: int) -> None:
            def closure() -> Tensor:
                loop.optimizer.zero_grad()
                loss = loop.loss(step)
                scaler.scale(loss).backward()
                return loss

            if loop.closure:
                scaler.step(loop.optimizer, closure=closure)
            else:
                closure()
                if step == BAD:
                    loop.spoil()
                scaler.step(loop.optimizer)
            scaler.update()

        return step_of

    return steps_of


KINDS: dict[str, Callable[[Loop], Callable[[int], None]]] = {
    "LossScaler": with_loss_scaler,
    "GradScaler": with_grad_scaler(GradScaler),
    "torch's GradScaler": with_grad_scaler(torch.amp.GradScaler),
}


def _contents(path: str, value: Any, inside: set[int]) -> Iterator[tuple[str, bytes]]:
    """Yields the bits of every tensor and number in a value, with where it is."""
    if id(value) in inside:
        return
    inside = inside | {id(value)}
    if isinstance(value, Tensor):
        yield from _of_tensor(path, value.detach(), inside)
    elif isinstance(value, random.Random):
        yield path, repr(value.getstate()).encode()
    elif isinstance(value, Mapping):
        for index, (key, each) in enumerate(value.items()):
            name = key if isinstance(key, str) else f"{type(key).__name__} {index}"
            yield from _contents(f"{path}.{name}", each, inside)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, each in enumerate(value):
            yield from _contents(f"{path}[{index}]", each, inside)
    elif hasattr(value, "__dict__") and not isinstance(value, OTHERS):
        yield from _contents(path, vars(value), inside)
    elif isinstance(value, bool | int | float | complex | str | None):
        yield path, repr(value).encode()


def _of_tensor(path: str, tensor: Any, inside: set[int]) -> Iterator[tuple[str, bytes]]:
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _contents(f"{path}.{name}", getattr(tensor, name), inside)
    else:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        bits = dense.contiguous().view(-1).view(torch.uint8)
        yield f"{path} {dense.dtype} {tuple(dense.shape)}", bits.numpy().tobytes()
