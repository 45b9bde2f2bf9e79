"""A training run with faults, on one process or spread over ranks, and a report of all that must agree."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from tests.torch.ranks.faults import Fault, Injection, Place, in_stages
from tests.torch.ranks.gpt import EXACT, GPT, ROUNDED, Arithmetic, batch_of
from tests.torch.ranks.layouts import LAYOUTS, pipelines_mesh
from tests.torch.ranks.whole import digest_of, whole_state
from torch import Tensor, nn

from gradscale import Dynamic, Policy
from gradscale.torch import GradScaler, LossScaler

Optimizer = torch.optim.Optimizer

MICROBATCHES = 2
"""Of a pipeline."""


class Scaler(Protocol):
    """What a training loop does with a scaler."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> tuple[str, float | None]: ...

    def scale(self) -> float: ...

    def state(self) -> dict[str, Any]: ...


class WithLossScaler:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: Policy,
        clip_norm: float | None,
        agree: Literal["auto", "always"] = "auto",
        *,
        stages: Any = None,
    ) -> None:
        self.scaler = LossScaler(model, policy, agree=agree, distinct=stages)
        self.optimizer, self.clip_norm = optimizer, clip_norm

    def backward(self, loss: Tensor) -> None:
        self.scaler.backward(loss)

    def step(self) -> tuple[str, float | None]:
        """Returns the status of the step, and the norm if it was applied."""
        result = self.scaler.step(self.optimizer, clip_norm=self.clip_norm, norm=True)
        return str(result.status()), None if result.skipped() else float(result.grad_norm)  # type: ignore[arg-type]

    def scale(self) -> float:
        return float(self.scaler.loss_scale)

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()


class WithDropIn:
    def __init__(
        self, model: nn.Module, optimizer: Optimizer, policy: Policy, clip_norm: float | None, *, agrees: bool = False
    ) -> None:
        group = dist.group.WORLD if agrees and dist.is_initialized() else None
        self.scaler = GradScaler("cpu", policy=policy, group=group)
        self.optimizer = optimizer

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> tuple[str, float | None]:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return "skipped" if self.scaler.last.skipped() else "applied", None  # type: ignore[union-attr]

    def scale(self) -> float:
        return self.scaler.get_scale()

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()


SCALERS: dict[str, Callable[..., Scaler]] = {
    "LossScaler": WithLossScaler,
    "LossScaler that always agrees": functools.partial(WithLossScaler, agree="always"),
    "GradScaler": WithDropIn,
    "GradScaler that always agrees": functools.partial(WithDropIn, agrees=True),
}


def places_of(layout: str, scaler: str) -> tuple[Place, ...]:
    """Returns where faults are, of which all ranks must learn."""
    # Under DDP a clean step has no collective of its own: what is written to the gradients of one replica after DDP has
    # reduced them, the others cannot know, unless they always agree.
    if not layout.startswith("DDP") or scaler.endswith("that always agrees"):
        return ("loss", "backward", "gradient")
    # `GradScaler` does not learn of the losses of other ranks either: it takes theirs for an overflow.
    return ("backward",) if scaler == "GradScaler" else ("loss", "backward")


@dataclass(frozen=True)
class Run:
    """What is trained, whatever it is spread over.

    Attributes:
        scaler: a name of `SCALERS`.
        steps: how many.
        faults: by step.
        exact: whether sums do not depend on their order, and gradients are not clipped.
        digest_every: steps between two digests.
    """

    scaler: str
    steps: int
    faults: dict[int, Fault]
    exact: bool = True
    digest_every: int = 10

    @property
    def policy(self) -> Policy:
        return Dynamic(init_scale=2.0**16, growth_interval=10)

    def optimizer(self, model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        foreach = len(set(map(type, parameters))) == 1  # torch refuses plain tensors beside distributed ones
        if self.exact:
            # The rate is a power of two: its products are exact, with or without a fused multiply-add, which kernels
            # have for some of the elements, and for others not, depending on how many there are.
            return torch.optim.SGD(parameters, lr=2.0**-8, momentum=0.9, foreach=foreach)
        return torch.optim.AdamW(parameters, lr=2.0**-8, eps=1e-3, foreach=foreach)


@dataclass
class Report:
    """What a run came to.

    Attributes:
        statuses: of each step.
        norms: gradient norms of the steps that were applied, by step, if the scaler gives them.
        scales: after each step.
        digests: of weights, optimizer state and scaler, now and then and at the end.
        weights: by name, at the end.
        state: of the scaler, at the end.
    """

    statuses: list[str] = field(default_factory=list)
    norms: dict[int, float] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


Pass = Callable[[int, Tensor, Tensor], Any]
"""Runs the forward and the backward pass of a step."""


def plain_pass(model: nn.Module, scaler: Scaler, kind: Arithmetic, injection: Injection) -> Pass:
    return lambda step, x, y: scaler.backward(injection.loss(step, kind.loss, model(x), y))


def pipelined_pass(
    model: nn.Module, scaler: WithLossScaler, kind: Arithmetic, injection: Injection, schedule_name: str, stages: Any
) -> Pass:
    from torch.distributed import pipelining

    position, current = dist.get_rank(stages), 0
    stage = pipelining.PipelineStage(model, position, 2, torch.device("cpu"), group=stages)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        # Up to torch 2.7, schedules leave the division by the number of micro-batches to the user.
        parts = 1 if getattr(schedule, "scale_grads", False) else MICROBATCHES
        return injection.loss(current, kind.loss, logits, targets) / parts

    schedule = getattr(pipelining, schedule_name)(stage, MICROBATCHES, loss_fn=scaler.scaler.wrap_loss(loss_fn))

    def run(step: int, x: Tensor, y: Tensor) -> None:
        nonlocal current
        current = step
        schedule.step(*([x] if position == 0 else []), target=y if position == 1 else None)

    return run


def train(run: Run, layout_name: str | None) -> Report:
    """Trains the model on this rank of a layout, or on one process if it is None."""
    layout = None if layout_name is None else LAYOUTS[layout_name]
    rank = None if layout is None else dist.get_rank()
    schedule = None if layout is None else layout.schedule
    kind = EXACT if run.exact else ROUNDED
    model: Any = GPT(kind) if layout is None else layout.spread(GPT(kind))
    optimizer, clip_norm = run.optimizer(model), None if run.exact else 0.25
    report, stages = Report(), None
    if schedule is None:
        injection = Injection(run.faults, rank)
        scaler = SCALERS[run.scaler](model, optimizer, run.policy, clip_norm)
        forward_and_backward = plain_pass(model, scaler, kind, injection)
    else:
        injection, stages = Injection(in_stages(run.faults), rank), pipelines_mesh().get_group("stage")
        scaler = WithLossScaler(model, optimizer, run.policy, clip_norm, stages=stages)
        forward_and_backward = pipelined_pass(model, scaler, kind, injection, schedule, stages)
    for step in range(run.steps):
        x, y = batch_of(step) if layout is None or rank is None else batch_of(step, layout.part(rank), layout.parts)
        forward_and_backward(step, x, y)
        injection.into_gradients(step, model)
        status, norm = scaler.step()
        optimizer.zero_grad()
        report.statuses.append(status)
        if norm is not None:
            report.norms[step] = norm
        report.scales.append(scaler.scale())
        if (step + 1) % run.digest_every == 0 or step + 1 == run.steps:
            state = whole_state(model, optimizer, stages)
            report.digests.append(digest_of(state, scaler.state()))
            report.weights = {name: tensors[0] for name, tensors in state.items()}
    report.state = scaler.state()
    return report


def train_each(runs: Sequence[Run], layout_name: str) -> list[Report]:
    """Returns the reports of several runs in a layout, one after the other."""
    return [train(run, layout_name) for run in runs]
