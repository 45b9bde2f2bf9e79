"""`probe`: runs a step again, under a mode that looks at every operation."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradscale.engine.culprits import culprits_of
from gradscale.engine.diagnosis import Weights
from gradscale.policies.checks import USELESS_SCALE, check_number
from gradscale.torch.accumulation.leaves import leaves_of
from gradscale.torch.accumulation.retry import Stash
from gradscale.torch.local import local
from gradscale.torch.probing.report import Origin, ProbeReport, Run, TensorFacts, is_number_tensor, report_of
from gradscale.torch.step.gradients import Names

if TYPE_CHECKING:
    from gradscale.torch.probing.mode import ProbeMode

FRAMES = 21
"""Operations that a report keeps, by default."""

Step = Callable[[], Tensor]
AnyRank = Callable[[Tensor], list[bool]]


probing: ContextVar[bool] = ContextVar("probing", default=False)
"""Whether a probe runs, whose forward passes are not part of training."""


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Generator[ExitStack]:
    """Puts back gradients, buffers and torch's random numbers at the end of the block.

    Inside, parameters have no gradients, and hooks that wait for one are not called. Compiled functions run uncompiled,
    so that their operations can be seen, and DDP sends no gradients. Costs a copy of the buffers.
    """
    # Frozen ones, too: a step may be told to train them.
    parameters = list(_parameters(modules).values())
    buffers = list({id(each): each for module in modules for each in module.buffers()}.values())
    devices = {each.device for each in (*parameters, *buffers)}
    with ExitStack() as blocks:
        blocks.enter_context(torch.random.fork_rng(devices=[]))
        kind = min((device.type for device in devices if device.type not in ("cpu", "meta")), default=None)
        if kind is not None and hasattr(torch.get_device_module(kind), "get_rng_state"):
            indices = [device for device in devices if device.type == kind]
            blocks.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        for buffer in buffers:
            # Through `data`, which does not raise the version: a graph that was made before stays valid.
            blocks.callback(lambda buffer, copy: buffer.data.copy_(copy), buffer, buffer.detach().clone())
        blocks.callback(Stash(parameters).restore)
        blocks.callback(probing.reset, probing.set(True))
        blocks.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                blocks.enter_context(module.no_sync())
        yield blocks


def _parameters(modules: Sequence[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(each): each for module in modules for each in module.parameters()}


class Probe:
    """Runs a step any number of times, each from the same buffers, gradients and random numbers.

    Args:
        step: runs the forward pass and returns the loss: neither scaled nor differentiated.
        modules: the model.
        any_rank: returns which of a few flags are set on any of the ranks that probe together.
    """

    def __init__(self, step: Step, modules: Sequence[nn.Module], any_rank: AnyRank) -> None:
        self._step = step
        self._modules = modules
        self._names = Names(modules)
        self._any_rank = any_rank

    def run(self, scale: float, mode: "ProbeMode | None" = None) -> Run:
        """Runs forward and backward pass; the backward pass only if the loss is finite."""
        looked_at = mode or nullcontext()
        with restored(self._modules) as blocks:
            with looked_at:
                loss = check_loss(self._step())
                scaled = (loss.float() if loss.dtype.itemsize < 4 else loss) * scale
            value = float(local(loss.detach()))
            if self.any_rank(not math.isfinite(value)):
                return Run(value, (), mode and mode.origin_of(loss), tuple(mode.frames if mode else ()))
            leaves = {id(leaf): leaf for leaf in leaves_of(scaled)}
            # Those of inputs too, which are no parameters.
            blocks.callback(Stash(list(leaves.values())).restore)
            if mode is not None:
                mode.in_backward = True
            with looked_at:
                scaled.backward()
            # Not the leaves alone: FSDP2 has whole parameters there, and gives the gradients to their shards.
            parameters = _parameters(self._modules)
            held = [leaf for leaf in (parameters | leaves).values() if leaf.grad is not None]
            sizes = [TensorFacts.of(leaf.grad).amax for leaf in held]  # type: ignore[arg-type]
            names = zip(held, self._names.of(held, ()), strict=True)
            named = [name if id(leaf) in parameters else "an input" for leaf, name in names]
            bad = [leaf.grad for leaf, size in zip(held, sizes, strict=True) if not math.isfinite(size)]
            culprits = tuple(culprits_of(named, sizes))
            if mode is None:
                return Run(value, culprits, None, ())
            found = filter(None, map(mode.origin_of, bad))  # type: ignore[arg-type]
            earliest = min(found, key=lambda origin: origin.operation.index, default=None)
            return Run(value, culprits, earliest, tuple(mode.frames))

    def halvings(self, scale: float) -> int | None:
        """Returns the fewest halvings of the scale that give finite gradients; None if none does. Runs up to 8 steps.

        It is a bisection: what is finite at a scale is taken to be finite at all lower ones.
        """
        lowest = max(0, math.floor(math.log2(scale / USELESS_SCALE)))
        if not lowest or self.any_rank(not self.run(scale / 2**lowest).finite):
            return None
        too_few, enough = 0, lowest
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.any_rank(not self.run(scale / 2**middle).finite):
                too_few = middle
            else:
                enough = middle
        return enough

    def named(self, origin: Origin | None) -> Origin | None:
        """Returns the origin, as a parameter where what seems to be an input was gathered from the ranks."""
        parameters = list(filter(is_number_tensor, _parameters(self._modules).values()))
        broken = [each for each in parameters if not TensorFacts.of(each).finite]
        if not self.any_rank(bool(broken)) or origin is None or origin.outside is None or origin.parameter:
            return origin
        # FSDP gathers its weights from memory of its own.
        name = self._names.of(broken[:1], ())[0] if broken else "a parameter of another rank"
        return replace(origin, outside=name, parameter=True)

    def weights(self, at_start: float) -> Weights | None:
        """Returns how large the weights of the model are; None without one."""
        floating = list(filter(is_number_tensor, _parameters(self._modules).values()))
        sizes = [TensorFacts.of(each).amax for each in floating]
        return Weights.of(zip(sizes, self._names.of(floating, ()), strict=True), at_start)

    def any_rank(self, flag: bool) -> bool:
        """Returns whether a flag is set on any of the ranks that probe together."""
        device = next((each.device for each in _parameters(self._modules).values()), None)
        return self._any_rank(torch.tensor([flag], device=device))[0]


def probe(
    step: Step,
    *modules: nn.Module,
    scale: float = 65536.0,
    other: Step | None = None,
    frames: int = FRAMES,
    weights_at_start: float | None = None,
    any_rank: AnyRank | None = None,
) -> ProbeReport:
    """Runs a step again and returns the first operation whose result is not finite, and what to do about it.

        report = probe(lambda: loss_fn(model(x), y), model, scale=scaler.get_scale())
        print(report)

    Every operation of forward and backward pass is looked at, also those between modules. If the gradients are not
    finite, the step is run at lower scales, up to 8 times, to find one that fits. Afterwards weights, buffers,
    gradients and torch's random numbers are as before; compiled models run uncompiled. Synchronizes at every
    operation: for one step, not for training. `LossScaler.probe` knows model and scale itself.

    Args:
        step: runs the forward pass, with its autocast, and returns the loss: neither scaled nor differentiated.
        *modules: the model, or models, whose modules and parameters are named.
        scale: what the loss is multiplied by.
        other: the same with another batch, to tell a bad batch from a bad model.
        frames: how many operations the report keeps.
        weights_at_start: the largest weight before training, to recognize weights that have diverged.
        any_rank: returns which of a few flags are set on any rank, where several probe together.

    Raises:
        TypeError: `step` does not return a loss, or a module is none.
        ValueError: there is no module, or `scale` is not positive and finite.
    """
    if not modules:
        raise ValueError("`probe` needs the model, whose state it restores. Call `probe(step, model)`.")
    if wrong := [type(each).__name__ for each in modules if not isinstance(each, nn.Module)]:
        raise TypeError(f"`probe` takes modules after the step. Received: {wrong[0]}. Call `probe(step, model)`.")
    check_number("scale", scale)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"`scale` must be positive and finite: the loss is multiplied by it. Received: scale={scale!r}."
        )
    from gradscale.torch.probing.mode import ProbeMode

    any_rank = any_rank or Tensor.tolist
    runs = Probe(step, modules, any_rank)
    first = runs.run(scale, ProbeMode(modules, frames, Probe.run.__code__))
    # Ranks run the same steps, though the gradients of one alone may have overflowed.
    overflowed = runs.any_rank(bool(first.culprits))
    halvings = runs.halvings(scale) if overflowed else None
    origin = first.origin
    if overflowed and halvings is None:
        # At the scale of training something may overflow first that a lower one cures: what is left is the cause.
        origin = runs.run(USELESS_SCALE, ProbeMode(modules, frames, Probe.run.__code__)).origin or origin
    first = replace(first, origin=runs.named(origin))
    weights = None if first.finite or weights_at_start is None else runs.weights(weights_at_start)
    other_finite = None if other is None else Probe(other, modules, any_rank).run(scale).finite
    return report_of(first, scale, halvings, weights, other_finite)


def check_loss(loss: Tensor, returned_by: str = "step") -> Tensor:
    """Returns the loss that a function of the user's has returned, or raises if it is none."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = (
            f"a tensor of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise TypeError(
            f"`{returned_by}` must return the loss: a tensor of one number that can be differentiated. "
            f"Received: {shown}. Return it as it is, neither scaled nor after `.backward()` or `.item()`."
        )
    return loss
