"""The sides of the benchmark: a step without scaling, with torch's scaler or the drop-in, and with `LossScaler`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from benchmarks.turns import Side
from torch import Tensor

from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.torch import GradScaler, LossScaler

Optimizer = torch.optim.Optimizer

SCALE = 2.0**16
NEVER = 10**6
"""A growth interval that no benchmark reaches: every repeat has the same scale."""

TORCH, BARE = "torch GradScaler", "no scaling"

STEADY = Dynamic(init_scale=SCALE, growth_interval=NEVER)


@dataclass(frozen=True)
class Case:
    """Parameters, their optimizer, and whether gradients are clipped.

    Attributes:
        name: its name in a table.
        shapes: of the parameters, which are float32.
        make_optimizer: returns the optimizer of the parameters it is given.
        clip: bound on the norm of the gradients; None does not clip.
        device: device of the parameters.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    make_optimizer: Callable[[list[Tensor]], Optimizer]
    clip: float | None
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class StepSide(Side):
    """One way to make a step, on parameters of its own. `prepare` sets new gradients at the side's scale."""

    parameters: Sequence[Tensor]


def all_sides(case: Case, policy: Policy = STEADY) -> dict[str, StepSide]:
    """Returns every way to make the step, by name. torch's scaler is the first."""
    return {
        TORCH: grad_scaler(case),
        "LossScaler": loss_scaler(case, policy),
        "drop-in GradScaler": grad_scaler(case, GradScaler),
        BARE: bare(case),
    }


def bare(case: Case) -> StepSide:
    """Returns the side that does not scale: clips, where the case does, and steps."""
    parameters, optimizer = _own(case)

    def run() -> None:
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()

    return _side(case, parameters, run, lambda: torch.ones((), device=case.device))


def grad_scaler(case: Case, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler) -> StepSide:
    """Returns the side of torch's scaler, or of the drop-in, called in torch's order."""
    parameters, optimizer = _own(case)
    scaler = kind(torch.device(case.device).type, init_scale=SCALE, growth_interval=NEVER)

    def run() -> None:
        if case.clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        scaler.step(optimizer)
        scaler.update()

    return _side(case, parameters, run, lambda: scaler.scale(torch.ones((), device=case.device)))


def loss_scaler(case: Case, policy: Policy = STEADY) -> StepSide:
    """Returns the side of `LossScaler`."""
    parameters, optimizer = _own(case)
    scaler = LossScaler(policy=policy, device=case.device)

    def scale() -> Tensor:
        scaler.backward(torch.ones((), device=case.device, requires_grad=True))
        return scaler.loss_scale

    return _side(case, parameters, lambda: scaler.step(optimizer, clip_norm=case.clip), scale)


def _own(case: Case) -> tuple[list[Tensor], Optimizer]:
    """Returns parameters and an optimizer that no other side shares."""
    parameters: list[Tensor] = [
        torch.nn.Parameter(values) for values in _random(case.shapes, case.device, seed=0, size=0.02)
    ]
    return parameters, case.make_optimizer(parameters)


def _side(case: Case, parameters: Sequence[Tensor], run: Callable[[], object], begin: Callable[[], Tensor]) -> StepSide:
    """Returns a side with new gradients for every run. `begin` returns the scale to multiply them by."""
    # The same gradients, unscaled and clipped again by every run, would end as subnormals, which some processors are
    # slow at.
    unscaled = _unscaled_gradients(tuple(map(tuple, case.shapes)), case.device)

    def prepare() -> None:
        for parameter in parameters:
            parameter.grad = None
        scale = begin()
        for parameter, gradient in zip(parameters, unscaled, strict=True):
            parameter.grad = gradient * scale

    return StepSide(run, prepare, _synchronizer(case.device), parameters=parameters)


@lru_cache(maxsize=1)  # the sides of one case share them, to save memory
def _unscaled_gradients(shapes: tuple[tuple[int, ...], ...], device: str) -> list[Tensor]:
    return _random(shapes, device, seed=1, size=1e-3)


def _random(shapes: Sequence[tuple[int, ...]], device: str, *, seed: int, size: float) -> list[Tensor]:
    """Returns the same random numbers on every device, in float32 whatever torch's defaults are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes)
    return [(values * size).to(device) for values in made]


def _synchronizer(device: str) -> Callable[[], object]:
    """Returns what synchronizes with `device`; for the CPU it does nothing."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != torch.device(device).type:
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)
