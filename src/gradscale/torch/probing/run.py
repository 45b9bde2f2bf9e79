"""`probe`: runs a step again, under a mode that looks at every operation."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.culprits import culprits_of
from gradscale.engine.health import Evidence
from gradscale.engine.probe_report import ProbeReport, Run, judged
from gradscale.formats import FP16
from gradscale.policies.checks import USELESS_SCALE, check_number
from gradscale.torch.gradients import Names, local
from gradscale.torch.probing.mode import ProbeMode, facts_of, is_number_tensor
from gradscale.torch.window.autograd import leaves_of
from gradscale.torch.window.buffers import writable_buffers
from gradscale.torch.window.retry import AnyRank, Stash

FRAMES = 21
"""Operations that a report keeps, by default."""

Step = Callable[[], Tensor]
Use = Callable[[dict[str, Tensor]], None]

probing: ContextVar[bool] = ContextVar("probing", default=False)
"""Whether a probe runs, whose forward passes are not part of training."""


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Generator[ExitStack]:
    """Puts back buffers, torch's random numbers and what is added to the stack. Inside, nothing runs compiled."""
    devices = {each.device for module in modules for each in (*module.parameters(), *module.buffers())}
    # Of one kind of accelerator; the CPU's numbers are put back whatever it is.
    kinds = {each.type for each in devices if hasattr(getattr(torch, each.type, None), "get_rng_state")}
    kind = min(kinds, default="cuda")
    with ExitStack() as blocks:
        blocks.enter_context(torch.random.fork_rng([each for each in devices if each.type == kind], device_type=kind))
        keep_buffers(modules, blocks)
        blocks.callback(probing.reset, probing.set(True))
        blocks.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                blocks.enter_context(module.no_sync())
        yield blocks


def keep_buffers(modules: Sequence[nn.Module], blocks: ExitStack) -> None:
    """Puts back the buffers of modules at the end of `blocks`, those that a forward pass has replaced too."""
    for part in {part for module in modules for part in module.modules()}:
        for name, buffer in part.named_buffers(recurse=False):
            blocks.callback(setattr, part, name, buffer)
        for _, buffer in writable_buffers(part):
            # Through `data`, which does not raise the version: a graph that was made before stays valid.
            blocks.callback(lambda buffer, copy: buffer.data.copy_(copy), buffer, buffer.detach().clone())


class Probe:
    """Runs steps, each from the same buffers, gradients and random numbers."""

    def __init__(self, modules: Sequence[nn.Module], any_rank: AnyRank | None) -> None:
        self._modules = modules
        self._any_rank = any_rank or Tensor.tolist

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters at present: FSDP2 replaces them in the forward pass."""
        return list(dict.fromkeys(Names(self._modules).parameters()))

    def run(self, step: Step, scale: float, *, looks: bool = False, use: Use = lambda grads: None) -> Run:
        """Runs a step, the backward pass only if the loss is finite on every rank, and uses the gradients by name.

        May look at every operation.
        """
        before = self.parameters
        with _restored(self._modules) as blocks:
            mode = ProbeMode(self._modules) if looks else None
            with mode or nullcontext():
                loss = check_loss(step())
                scaled = (loss.float() if loss.dtype.itemsize < 4 else loss) * scale
            value, culprits = float(local(loss.detach())), []
            bad = [] if math.isfinite(value) else [loss]
            if not self.anywhere(bool(bad)):
                # Inputs, too. FSDP2 has whole parameters in the graph, and gives the gradients to their shards.
                stash = Stash([*before, *leaves_of(scaled)])
                blocks.callback(stash.restore)
                stash.begin()
                if mode is not None:
                    mode.in_backward = True
                with mode or nullcontext():
                    scaled.backward()
                held = [each for each in self.parameters if each.grad is not None]
                grads: list[Tensor] = [each.grad for each in held]  # type: ignore[misc]
                sizes = [facts_of(grad).amax for grad in grads]
                names = Names(self._modules).of(held, ())
                use(dict(zip(names, grads, strict=True)))
                culprits = culprits_of(names, sizes)
                bad = [grad for grad, size in zip(grads, sizes, strict=True) if not math.isfinite(size)]
            return Run(value, tuple(culprits)) if mode is None else Run(value, tuple(culprits), *mode.found(bad))

    def halvings(self, step: Step, scale: float) -> int | None:
        """Returns the fewest halvings of the scale that give finite gradients; None if none does. In up to 8 steps."""

        def enough(halvings: int) -> bool:
            return not self.anywhere(not self.run(step, scale / 2**halvings).finite)

        # What is finite at a scale is taken to be finite at all lower ones.
        most = max(0, math.floor(math.log2(scale / USELESS_SCALE)))
        return 1 + bisect_left(range(1, most), True, key=enough) if most and enough(most) else None

    def anywhere(self, flag: bool) -> bool:
        """Returns whether a flag is set on any of the ranks that probe together."""
        device = next((each.device for each in self.parameters), None)
        return self._any_rank(torch.tensor([flag], device=device))[0]

    def ranks(self, flag: bool) -> str:
        """Returns the ranks on which a flag is set, where several probe together."""
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        device, own = next((each.device for each in self.parameters), None), dist.get_rank()
        flags = [flag and rank == own for rank in range(dist.get_world_size())]
        return ", ".join(
            str(rank) for rank, bad in enumerate(self._any_rank(torch.tensor(flags, device=device))) if bad
        )


def probe(
    step: Step,
    *modules: nn.Module,
    scale: float = 65536.0,
    other: Step | None = None,
    frames: int = FRAMES,
    seen: Callable[[], Evidence] | None = None,
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
        seen: returns what a scaler knows of the run, to recognize weights that have diverged.
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
    probed = Probe(modules, any_rank)
    first = cause = probed.run(step, scale, looks=True)
    # Ranks run the same steps, though the gradients of one alone may have overflowed.
    overflowed = probed.anywhere(bool(first.culprits))
    halvings = probed.halvings(step, scale) if overflowed else None
    if overflowed and halvings is None:
        # At the scale of training something may overflow first that a lower one cures: what is left is the cause.
        lowest = probed.run(step, USELESS_SCALE, looks=True)
        cause = lowest if lowest.origin.operation else first
    parameters = list(filter(is_number_tensor, probed.parameters))
    sizes = [facts_of(each).amax for each in parameters]
    named = list(zip(sizes, Names(modules).of(parameters, ()), strict=True))
    broken = [name for size, name in named if not math.isfinite(size)]
    origin = cause.origin
    if probed.anywhere(bool(broken)) and origin.outside is not None and not origin.parameter:
        # What seems to be an input: FSDP gathers its weights from memory of its own.
        origin = replace(origin, outside=broken[0] if broken else "a parameter of another rank", parameter=True)
    large = next((f"{name} is {size:.3g}" for size, name in named if FP16.max < size < math.inf), None)
    bad_ranks = probed.ranks(not first.finite)
    other_finite = None if other is None else probed.run(other, scale).finite
    return ProbeReport(
        *judged(first, origin, scale, halvings, None if seen is None else seen(), large, other_finite, bad_ranks),
        *(origin.operation, origin.overflow, origin.outside),
        *(scale, None if halvings is None else scale / 2**halvings, halvings),
        *(first.loss, first.culprits, tuple(deque(cause.operations, frames))),
    )


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
