"""`probe`: runs a step again, under a mode that looks at every operation."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.diagnosis import Weights
from gradscale.policies.checks import USELESS_SCALE, check_number
from gradscale.torch.accumulation.leaves import leaves_of
from gradscale.torch.local import local
from gradscale.torch.probing.operation import TensorFacts, is_number_tensor
from gradscale.torch.probing.origins import Origin
from gradscale.torch.probing.places import ModuleStack
from gradscale.torch.probing.report import Findings, ProbeReport
from gradscale.torch.probing.restore import restored, without_gradients
from gradscale.torch.step.gradients import Names
from gradscale.torch.wrappers import own_module, own_name

if TYPE_CHECKING:
    from gradscale.torch.probing.mode import ProbeMode

FRAMES = 21
"""Operations that a report keeps, by default."""

Step = Callable[[], Tensor]
AnyRank = Callable[[Tensor], list[bool]]


class Run(NamedTuple):
    """One run of a step.

    Attributes:
        loss: the loss, unscaled.
        culprits: the parameters whose gradients are not finite.
        origin: where the first number that is not finite comes from, if the run was looked at.
    """

    loss: float
    culprits: tuple[Culprit, ...]
    origin: Origin | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and not self.culprits


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
        with restored(self._modules), _eagerly(), _without_reduction(self._modules):
            with ExitStack() as looked_at:
                if mode is not None:
                    looked_at.enter_context(mode)
                loss = check_loss(self._step())
                scaled = (loss.float() if loss.dtype.itemsize < 4 else loss) * scale
            value = float(local(loss.detach()))
            if self.any_rank(not math.isfinite(value)):
                return Run(value, (), None if mode is None else mode.origins.of(loss))
            leaves = leaves_of(scaled)
            with without_gradients(leaves):
                with ExitStack() as looked_at:
                    if mode is not None:
                        mode.in_backward = True
                        looked_at.enter_context(mode)
                    scaled.backward()
                return self._result(value, leaves, mode)

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
        parameters = [each for module in self._modules for each in module.parameters() if is_number_tensor(each)]
        broken = [each for each in parameters if not TensorFacts.of(each).finite]
        if not self.any_rank(bool(broken)) or origin is None or origin.outside is None or origin.parameter:
            return origin
        # FSDP gathers its weights from memory of its own.
        name = self._names.of(broken[:1], ())[0] if broken else "a parameter of another rank"
        return replace(origin, outside=name, parameter=True)

    def weights(self, at_start: float) -> Weights | None:
        """Returns how large the weights of the model are; None without one."""
        parameters = {id(each): each for module in self._modules for each in module.parameters()}.values()
        floating = [each for each in parameters if is_number_tensor(each)]
        sizes = [TensorFacts.of(each).amax for each in floating]
        return Weights.of(zip(sizes, self._names.of(floating, ()), strict=True), at_start)

    def _result(self, loss: float, leaves: Sequence[Tensor], mode: "ProbeMode | None") -> Run:
        known = {id(each): each for module in self._modules for each in module.parameters()}
        # Not the leaves alone: FSDP2 has whole parameters there, and gives the gradients to their shards.
        candidates = (known | {id(leaf): leaf for leaf in leaves}).values()
        held = [leaf for leaf in candidates if leaf.grad is not None]
        sizes = [TensorFacts.of(leaf.grad).amax for leaf in held]  # type: ignore[arg-type]
        names = self._names.of(held, ())
        named = [name if id(leaf) in known else "an input" for leaf, name in zip(held, names, strict=True)]
        culprits = tuple(culprits_of(named, sizes))
        bad = [leaf.grad for leaf, size in zip(held, sizes, strict=True) if not math.isfinite(size)]
        origin = None if mode is None else mode.origins.first(grad for grad in bad if grad is not None)
        return Run(loss, culprits, origin)

    def any_rank(self, flag: bool) -> bool:
        """Returns whether a flag is set on any of the ranks that probe together."""
        device = next((each.device for module in self._modules for each in module.parameters()), None)
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

    runs = Probe(step, modules, any_rank or _this_rank)
    stack = ModuleStack(modules)

    def looked_at(at: float) -> tuple[Run, ProbeMode]:
        mode = ProbeMode(stack, _tensors(modules), frames, Probe.run.__code__)
        with stack.followed():
            return runs.run(at, mode), mode

    first, mode = looked_at(scale)
    # Ranks run the same steps, though the gradients of one alone may have overflowed.
    overflowed = runs.any_rank(bool(first.culprits))
    halvings = runs.halvings(scale) if overflowed else None
    origin = first.origin
    if overflowed and halvings is None:
        # At the scale of training something may overflow first that a lower one cures: what is left is the cause.
        origin = looked_at(USELESS_SCALE)[0].origin or origin
    origin = runs.named(origin)
    found = Findings(
        scale,
        first.loss,
        origin,
        first.culprits,
        halvings,
        None if first.finite or weights_at_start is None else runs.weights(weights_at_start),
        None if other is None else Probe(other, modules, any_rank or _this_rank).run(scale).finite,
        tuple(mode.frames),
    )
    return ProbeReport.of(found)


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


def _tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the parameters and buffers by name."""
    found: dict[str, Tensor] = {}
    for index, root in enumerate(map(own_module, modules)):
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            path = own_name(name, root)
            found[f"{index}.{path}" if len(modules) > 1 else path] = tensor
    return found


def _this_rank(flags: Tensor) -> list[bool]:
    return flags.tolist()


@contextmanager
def _eagerly() -> Generator[None]:
    """Runs compiled functions uncompiled in the block, so that their operations can be seen."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _without_reduction(modules: Sequence[nn.Module]) -> Generator[None]:
    """Keeps DDP from sending gradients in the block."""
    with ExitStack() as blocks:
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                blocks.enter_context(module.no_sync())
        yield
