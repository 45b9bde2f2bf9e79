"""Stage five, remember: the result of a step, whose tensors are made when they are read, and what outlives the step."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.health import (
    MAX_CONSECUTIVE_SKIPS,
    Evidence,
    Health,
    HealthLog,
    Losses,
    OnStuck,
    StuckCheck,
    Weights,
    health_of,
)
from gradscale.engine.measurement import UNREAD
from gradscale.engine.metrics import host_metrics
from gradscale.engine.result import Status, to_be_called
from gradscale.formats import FP16
from gradscale.kernels.torch import largest
from gradscale.policies.contract import ScaleState
from gradscale.recording.writer import RunRecorder
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, Names, local, numbers_of, parameters_of
from gradscale.torch.host import Facts, Rule, filled
from gradscale.torch.ranks.groups import is_first_rank, rank_and_ranks
from gradscale.torch.step.apply import Gate, StepPlan
from gradscale.torch.window.window import Window

Optimizer = torch.optim.Optimizer

LAZY = frozenset(("applied", "scale", "next_scale", "loss_finite", "grad_norm", "amax"))
"""The fields of a result that are made when they are read."""

NO_NAMES = Names(())

SAMPLE_EVERY = 16
"""Steps between two reads of the largest gradient for the headroom."""


class Traces:
    """Weak references to the gradients of a step, to find later which of them were not finite.

    Attributes:
        parameters: weak references to the parameters of the gradients.
    """

    # Weak, because a result may be kept in a log: it must not hold a set of gradients after `zero_grad`.

    __slots__ = ("_counts", "_grads", "_optimizers", "_versions", "parameters")

    def __init__(self, gradients: Gradients, sizes: Tensor | None = None) -> None:
        """Refers to `gradients`, and counts what is not finite in them if `sizes` of a skipped step are given.

        The counts then outlive the gradients. A pass over the non-finite gradients in host memory, over all of them on
        a device, where the sizes cannot be read. Does not synchronize.
        """
        self.parameters = list(map(weakref.ref, gradients.parameters))
        self._grads = list(map(weakref.ref, gradients.grads))
        self._versions = [grad._version for grad in gradients.grads]
        self._optimizers = list(map(weakref.ref, gradients.optimizers))
        self._counts: dict[int, Tensor] = {}
        if sizes is not None:
            known = sizes.tolist() if host.in_host_memory(sizes.device) else [math.nan] * len(gradients)
            bad = [index for index, size in enumerate(known) if not math.isfinite(size)]
            self._counts = {index: _nonfinite(gradients.values[index]) for index in bad}

    def names(self, indices: Sequence[int], names: Names) -> list[str]:
        """Returns the names of the parameters at `indices`."""
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return names.of([self.parameters[index]() for index in indices], optimizers)

    def sizes(self) -> list[float]:
        """Returns the largest magnitude in each gradient; 0 for one that was freed or written to. Synchronizes."""
        grads = list(map(self._unchanged, range(len(self._grads))))
        values = [numbers_of(grad) for grad in grads if grad is not None]
        found = iter(largest(values, values[0].device).tolist() if values else ())
        return [0.0 if grad is None else next(found) for grad in grads]

    def count(self, index: int) -> int | None:
        """Returns how many elements of a gradient are not finite. Synchronizes with the device.

        None if they were not counted in the step, and the gradient was freed or written to since; and where all are
        finite, and only their squares were not.
        """
        if index in self._counts:
            return int(self._counts[index]) or None
        grad = self._unchanged(index)
        return None if grad is None else int(_nonfinite(numbers_of(grad))) or None

    def _unchanged(self, index: int) -> Tensor | None:
        """Returns a gradient as the step left it, or None if it was freed or written to since."""
        grad = self._grads[index]()
        return None if grad is None or grad._version != self._versions[index] else grad


def _nonfinite(values: Tensor) -> Tensor:
    return (~torch.isfinite(values)).sum()


class StepResult(engine.StepResult):
    """The result of one `step`.

    `applied`, `scale`, `next_scale`, `loss_finite`, `grad_norm` and `amax` are 0-d tensors on the scaler's device, made
    when they are first read. Only `next_scale`, `loss_finite` and `amax` of a step that a fused kernel has gated
    synchronize for that. `poll` never synchronizes. `skipped`, `status` and `culprits` do.

    Attributes:
        facts: what was seen of the step.
        measured: the facts that have the norm, if they are others: those of edited gradients.
        rule: the rule that follows it.
        made_with: the scale that made the gradients, which nobody writes to.
        found_inf: 1 if the step is not applied, else 0, on the device; None where the host knows.
        after: the state that follows, once the rule knows it.
        traces: weak references to the gradients; None where all are known to be finite.
        parameter_names: the names of parameters.
        gradient_count: how many gradients the step had; 0 where they were not counted.
        known: whether the step was applied, if the host knows it already: no copy is needed then.
        skips: returns whether the step was skipped, where that is not known; None if the facts say so.
        found: the culprits of all ranks, where they were gathered in the step.
        notes: what the window has noted of losses.
    """

    __slots__ = (
        "after",
        "facts",
        "found",
        "found_inf",
        "gradient_count",
        "known",
        "made_with",
        "measured",
        "notes",
        "parameter_names",
        "rule",
        "skips",
        "traces",
    )

    def __init__(
        self,
        rule: Rule,
        plan: StepPlan,
        window: Window,
        facts: Facts,
        gate: Gate,
        *,
        measured: Facts | None = None,
        sizes: Tensor | None = None,
        names: Names | None = None,
    ) -> None:
        """Makes a result of what is known of a step. Nothing is computed on the device before it is read."""
        self.rule, self.facts, self.measured, self.made_with = rule, facts, measured or facts, window.scale
        self.found_inf, self.known = gate.found_inf, gate.applied if gate.found_inf is None else None
        self.after: ScaleState | None = None
        self.skips: Callable[[], bool] | None = None
        self.found: list[Culprit] | None = None
        self.notes = window.notes
        self.retries, self.attempted, self.counts, self.names = window.retries, self.measured.attempted, (), ()
        if not (self.attempted and plan.norm):
            self.grad_norm = None
        if not (self.attempted and plan.finds_amax):
            self.amax = None
        self.parameter_names, self.gradient_count = names or NO_NAMES, len(plan.gradients.grads)
        self.sizes, self.traces = None, None
        if facts.found is None or not facts.found.finite:
            # Counted now, as gradients may be cleared before anyone asks; not in a step that may have been applied.
            self.sizes = sizes
            self.traces = Traces(plan.gradients, sizes if self.known is False else None)

    def __getattr__(self, name: str) -> Any:
        """Makes a tensor of the result when it is first read."""
        if name not in LAZY:
            return super().__getattr__(name)  # type: ignore[misc]
        made = self._made(name)
        if name != "next_scale" and not self.facts.live:  # another `update` may change the first
            setattr(self, name, made)
        return made

    def _made(self, name: str) -> Tensor:
        device, measured = self.made_with.device, self.measured
        if name == "scale":
            return self.made_with.clone()
        if name == "applied":
            return filled(self.known, device, torch.bool) if self.found_inf is None else self.found_inf == 0
        if name == "next_scale":
            self.rule.catch_up()  # which sets `after`
            return filled(float((self.rule.state if self.after is None else self.after).scale), device)
        if name == "grad_norm" and measured.found is None and measured.norm is not None:
            return torch.nan_to_num(measured.norm(), torch.inf, torch.inf)
        if name == "grad_norm":
            return filled(float(measured.seen().norm), device)
        number = getattr(self.facts.seen(), name)
        return filled(number.item(), device, torch.bool if name == "loss_finite" else torch.float32)

    def _is_skipped(self) -> bool:
        if self.skips is not None:
            return self.skips()
        seen = self.facts.seen()
        return not (self.facts.attempted and bool(seen.finite and seen.loss_finite))

    def _shown(self, value: Any) -> Any:  # type: ignore[override]
        return host.shown(value)

    def __repr__(self) -> str:
        """Returns status, scales, norm and retries as text. Never synchronizes: what is on a device is not read."""
        if self.poll() is None:
            device = f"<on {self.scale.device}>"
            return f"{type(self).__name__}(status={device}, scale={self._shown(self.scale)}, next_scale={device})"
        return super().__repr__()

    def status_text(self) -> str:
        """Returns the status as text, or where it is if it is not in host memory. Never synchronizes."""
        if not self.attempted:
            return Status.NO_GRADS.value
        return f"<on {self.scale.device}>" if self.poll() is None else self.status().value

    @to_be_called
    def poll(self) -> bool | None:
        """Returns whether the step was applied, or None if that is not known yet. Never synchronizes."""
        if self.known is None and self.facts.arrived:
            self.known = not self._is_skipped()
        return self.known

    @to_be_called
    def skipped(self) -> bool:
        """Returns whether the optimizers were left alone. Synchronizes with the device."""
        if self.known is not None:
            return not self.known
        skipped = self._is_skipped()
        self.known = None if self.facts.live else not skipped
        return skipped

    @to_be_called
    def status(self) -> Status:
        """Returns the status of the step. Synchronizes with the device."""
        if not self.attempted:
            return Status.NO_GRADS
        return Status.of(False, self.facts.seen().loss_finite) if self.skipped() else Status.APPLIED

    @property
    def parameters(self) -> int:
        """How many gradients the step had, where that was recorded."""
        return self.gradient_count if self.traces is None else len(self.traces.parameters)

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in the optimizers' order. Synchronizes.

        Sizes were kept from the step, but not after `unscale_` and a fused step on a device. Counts of elements were
        kept where the host knew in the step that it is skipped: on the CPU, and with an optimizer that is not fused.
        What was not kept is read now, from gradients that were neither cleared nor written to since. With several ranks
        the list is the same on all of them where the host knew in the step; else it is of the gradients held here.
        """
        if self.found is not None:
            return list(self.found)
        if self.traces is None or (self.sizes is None and not self.skipped()):
            return []
        sizes: list[float] = self.traces.sizes() if self.sizes is None else self.sizes.tolist()
        return self._culprits(sizes, self.traces.count)

    def _culprits(self, sizes: Sequence[float], count: Callable[[int], int | None]) -> list[Culprit]:
        bad = [index for index, size in enumerate(sizes) if not math.isfinite(size)]
        names = self.traces.names(bad, self.parameter_names)  # type: ignore[union-attr]
        return culprits_of(names, [sizes[index] for index in bad], list(map(count, bad)))

    def culprits_on_their_way(self) -> Callable[[], dict[str, Any] | None]:
        """Returns what `RunRecorder.add` calls until it has them. On a device without counts; never synchronizes."""
        if self.found is not None or host.in_host_memory(self.made_with.device):
            found = self.culprits()
            return lambda: {"culprits": found}
        if self.traces is None or self.sizes is None:
            return dict
        copy = host.HostCopy(self.sizes)
        return lambda: {"culprits": self._culprits(copy.read(), lambda index: None)} if copy.arrived else None


def recorder_of(record: Any, rule: Rule) -> RunRecorder:
    """Returns the recorder of a scaler. It does not hold the rule, which it asks for the last step when a run ends."""
    if rule.capturable and record is not None:
        raise ValueError(
            "A run with `capturable=True` cannot be recorded, as the host sees none of its steps. "
            f"Received: record={record!r}. Log what `metrics()` returns now and then."
        )
    recorder, known = RunRecorder(record, "torch", rank_and_ranks), weakref.ref(rule)
    recorder.before_close = lambda: (rule := known()) and rule.catch_up(waits=False)
    return recorder


class Memory:
    """What a scaler remembers of its steps, all of it in host memory.

    Attributes:
        last: the result of the last step.
        measured: the optimizers that were stepped, whose weights were measured before.
        steps: how often a step was attempted, also by other ranks alone, so that all of them sample the same steps.
        after_step: called after every step.
        on_skips: called with the number of steps skipped in a row and the result of the last of them, before the check
            for a stuck run; None for nothing.
        probed: what the last probe has found, and how many steps had been skipped by then.
        recorder: what writes the record. That of a copy writes nothing.
    """

    def __init__(
        self,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_stuck: OnStuck = "raise",
        recorder: RunRecorder | None = None,
    ) -> None:
        self._stuck_check = StuckCheck(max_consecutive_skips, on_stuck)
        self.recorder = recorder or RunRecorder()
        self.after_step: list[Callable[[], None]] = []
        self.on_skips: Callable[[int, StepResult], None] | None = None
        self.forget()

    def __reduce__(self) -> tuple[type["Memory"], tuple[Any, ...]]:
        """A copy starts empty: results refer to gradients of the original."""
        return Memory, (self._stuck_check.max_consecutive_skips, self._stuck_check.on_stuck)

    def forget(self) -> None:
        """Forgets every step, as at the start."""
        self._stuck_check.reported = False
        self.last: StepResult | None = None
        self.steps = 0
        self._sizes: tuple[Any, Any] = (None, None)
        self._noted: tuple[StepResult, ScaleState] | None = None
        self._stuck = False
        self._first: tuple[Any, Tensor] | None = None  # losses and scale of the first such step
        self._finite: tuple[StepResult, ScaleState] | None = None  # of the last step whose loss was
        self._skip: StepResult | None = None
        self._bad_losses = self._rows = 0
        self.probed: tuple[str, int] = "", 0
        self._weights_at_start: list[Tensor] = []
        self.measured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._gradients: int | None = None
        self._counted = 0, 0
        self._log = HealthLog()

    def begin(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Measures the weights before the first step of each optimizer, once. Does not synchronize with the device."""
        # Without it, a model whose weights are large by design would look diverged when its run is stuck.
        if new := [optimizer for optimizer in optimizers if optimizer not in self.measured]:
            self.measured.update(new)
            if values := _readable(new)[1]:
                self._weights_at_start.append(largest(values, device))

    def _weights_now(self, optimizers: Sequence[Optimizer], names: Names) -> Weights | None:
        """Returns how large the weights are now; None if none can be read. Synchronizes with the device."""
        parameters, values = _readable(optimizers)
        sizes: list[float] = largest(values, values[0].device).tolist() if values else []
        before: list[float] = [size for sizes in self._weights_at_start for size in sizes.tolist()]
        known = len(before) == len(sizes) and sum(before) > 0
        return Weights.of(
            zip(sizes, names.of(parameters, optimizers), strict=True),
            # A NaN is the largest, and `max` may lose it.
            max(before, key=lambda size: math.inf if math.isnan(size) else size, default=None),
            growth=sum(sizes) / sum(before) if known else None,
            **_known_of(optimizers, names, same_weights=known),
        )

    def note(self, result: StepResult, facts: Facts, norm: bool, amax: bool, state: ScaleState) -> None:
        """Notes the state after a step, once the host knows it, with its unscaled norm and amax where they were read.

        On an accelerator with fused optimizers that is at the next loss. Where a step has no amax, the last one stays.
        """
        result.after, seen = state, facts.seen()
        self._sizes = seen.norm if norm else None, seen.amax if amax else self._sizes[1]
        if result.facts.seen().loss_finite:
            self._finite = result, state
            if self._first is None:
                self._first = result.notes, result.made_with
            if not seen.finite:
                self._rows += int(state.consecutive_skips) == 1
        elif state.consecutive_skips:
            self._bad_losses += 1
        self._noted, self._stuck = (result, state), bool(state.stuck)
        if self.recorder.on:
            self._record(result, seen.norm if norm else None, amax)

    def note_numbers(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Notes numbers of the user for a step to come. One on a device is copied, which does not synchronize."""
        if self.recorder.on:
            for name, number in numbers.items():
                one = isinstance(number, Tensor)
                self.recorder.note(step, {name: host.HostCopy(number.detach().reshape(1)) if one else float(number)})

    def _record(self, result: StepResult, norm: Any, amax: bool) -> None:
        """Adds a step to the record, with what the rule has seen of it. Never synchronizes with the device."""
        rule = result.rule
        before, seen, after = rule.followed  # type: ignore[misc]
        applied = after.skipped == before.state.skipped
        known = {
            "step": before.steps,
            "scale": float(before.state.scale),
            "status": Status.of(applied, seen.loss_finite),
            "norm": norm,
            "amax": seen.amax if amax or rule.reads.amax else None,
            "share": None if seen.upper_share is UNREAD.upper_share else seen.upper_share,
            "retries": result.retries,
        }
        later = dict if applied else result.culprits_on_their_way()
        self.recorder.add(rule.policy, before.state, after, known, before.amax_ratio, later)

    def keep(self, result: StepResult, optimizers: Sequence[Optimizer], gradients: int | None = None) -> None:
        """Keeps the result, and raises or warns if the run, as far as the host knows it, has been stuck for too long.

        The weights of `optimizers` are measured only for a report. `gradients` is how many they had, where the result
        is of one of them.
        """
        self.last, self._gradients = result, gradients
        for call in tuple(self.after_step):
            call()
        if result.attempted:
            self.steps += 1
            self._optimizers = list(map(weakref.ref, optimizers))
        else:
            self._sizes = None, self._sizes[1]
        # After an applied step there is nothing to check, unless it ends a row of skips.
        if self._noted is not None and (
            self._noted[1].consecutive_skips or self._stuck_check.reported or self.on_skips
        ):
            self.check()

    def check(self) -> None:
        """Raises or warns if the run, as far as the host knows it, has been stuck for too long."""
        noted, self._noted = self._noted, None
        if noted is None or not noted[0].attempted:
            return
        known, state = noted
        if self.on_skips is not None:
            self.on_skips(int(state.consecutive_skips), known)
        if not state.consecutive_skips:
            self._stuck_check.reported = False
            return
        optimizers = [each for reference in self._optimizers if (each := reference()) is not None]
        self._skip, loss_finite = known, bool(known.facts.seen().loss_finite)
        more = partial(self._known, state, optimizers, known.parameter_names)
        self._stuck_check.check(state, known, loss_finite, more)

    def metrics(self, state: ScaleState, *, check: bool = False) -> dict[str, float]:
        """Returns the newest numbers known on the host, after a `check` for a run that is stuck if asked for."""
        if check:
            self.check()
        return host_metrics(state, *self._sizes)

    def health(self, state: ScaleState, **settings: bool) -> Health:
        """Returns how the run is doing, and logs it on rank 0 if it has changed. Synchronizes with the device."""
        seen = self.evidence(state)
        self._counted, self._bad_losses, self._rows = (seen.applied, seen.skipped), 0, 0
        health = health_of(replace(seen, **settings))
        if is_first_rank():
            self._log.note(health)
        return health

    def evidence(self, state: ScaleState) -> Evidence:
        """Returns what is known of the run after its last step. Synchronizes with the device."""
        seen = Evidence(float(state.scale), int(state.applied), int(state.skipped), int(state.consecutive_skips))
        if (last := self.last) is None:
            return seen
        optimizers = [each for reference in self._optimizers if (each := reference()) is not None]
        gradients = last.parameters if self._gradients is None else self._gradients
        known = self._known(state, optimizers, last.parameter_names)
        skips = self._skip is not None and (known["recent"][1] or seen.consecutive_skips)
        return replace(
            seen,
            stuck=self._stuck and seen.consecutive_skips > 1,
            status=last.status(),
            headroom_bits=_headroom_bits(self._sizes[1], seen.scale),
            culprits=self._skip.culprits() if self._skip is not None and skips else (),
            parameters=last.parameters,
            without_gradients=_without_gradients(last, optimizers, gradients),
            **known,
        )

    def _known(self, state: ScaleState, optimizers: Sequence[Optimizer], names: Names) -> dict[str, Any]:
        """Returns what else is known of the run, by the names of `Evidence`. Synchronizes with the device."""
        skipped, (result, finite) = int(state.skipped), self._finite or (None, None)
        rank, own = None, None if self._skip is None else _losses(self._skip.notes, self._skip.made_with)
        if own is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            rank = dist.get_rank(), dist.get_world_size(), all(map(math.isfinite, own.values))
        return {
            "recent": (int(state.applied) - self._counted[0], skipped - self._counted[1]),
            "bad_losses": self._bad_losses,
            "rows": self._rows,
            "last_finite_loss": None if finite is None else int(finite.applied) + int(finite.skipped),
            "weights": self._weights_now(optimizers, names),
            "first_losses": None if self._first is None else _losses(*self._first),
            "losses": None if result is None else _losses(result.notes, result.made_with),
            "policy": "" if self.last is None else type(self.last.rule.policy).__name__,
            "rank": rank,
            "probed": self.probed[0] if skipped - self.probed[1] <= int(state.consecutive_skips) else "",
        }


def _losses(notes: Sequence[tuple[bool, Tensor]], scale: Tensor) -> Losses | None:
    """Returns the losses of a step and their scale; None without one. Synchronizes with the device."""
    values = [float(note) for is_mark, note in notes if not is_mark]
    return Losses(values, float(scale)) if values else None


def _known_of(optimizers: Sequence[Optimizer], names: Names, *, same_weights: bool) -> dict[str, Any]:
    """Returns what optimizers show of weights, by the names of `Weights`. Synchronizes with the device."""
    groups = [(type(optimizer), group) for optimizer in optimizers for group in optimizer.param_groups]
    # The highest rate that a schedule has had, or may have, too. An update of Adam is at most
    # (1 - beta1) / sqrt(1 - beta2) times that: 3.2 by default, and 10 for a beta2 of 0.9999.
    rates = [max(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr")) for _, group in groups]
    is_adam = all(
        kind in (torch.optim.Adam, torch.optim.AdamW) and rate * group["weight_decay"] < 2
        for (kind, group), rate in zip(groups, rates, strict=True)
    )
    # A fused kernel computes in float32.
    plain = {id(each): group for _, group in groups if not group.get("fused") for each in group["params"]}
    held = [
        (parameter, key, values)
        for optimizer in optimizers
        for parameter, state in getattr(optimizer, "state", {}).items()
        for key, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, Tensor) and type(values := local(value)) is Tensor and _is_dense_float(values)
    ]
    squares = {
        values.dtype: plain[id(each)].get("eps")
        for each, key, values in held
        if key == "exp_avg_sq" and id(each) in plain
    }
    zero = [
        (eps, str(dtype)[6:])
        for dtype, eps in squares.items()
        if isinstance(eps, float) and not torch.tensor(eps, dtype=dtype)
    ]
    sizes: list[float] = largest([each[2] for each in held], held[0][2].device).tolist() if held else []
    bad = [each for each, size in zip(held, sizes, strict=True) if not math.isfinite(size)]
    named = names.of([parameter for parameter, _, _ in bad], optimizers)
    return {
        "learning_rate": max((float(group["lr"]) for _, group in groups if "lr" in group), default=None),
        "decay": max(map(_decay, groups), default=0.0),
        "reach": 10 * max(rates) if rates and is_adam and same_weights else None,
        "zero_eps": zero[0] if zero else None,
        "bad_state": [f"{key} of {name}" for (_, key, _), name in zip(bad, named, strict=True)],
    }


def _decay(of: tuple[type[Optimizer], dict[str, Any]]) -> float:
    kind, group = of
    decays = kind in (torch.optim.SGD, torch.optim.AdamW)  # Adam adds it to the gradient, whose size it then divides by
    return float(group["lr"]) * float(group["weight_decay"]) if decays else 0.0


def _headroom_bits(amax: Any, scale: float) -> float:
    """Returns how often the scale could double; inf if all gradients are zero, NaN if they are not known."""
    if amax is None or not math.isfinite(largest := float(amax) * scale):
        return math.nan
    return math.log2(FP16.max / largest) if largest else math.inf


def _without_gradients(last: StepResult, optimizers: Sequence[Optimizer], gradients: int) -> list[str]:
    """Returns the names of frozen parameters, if some had no gradient; where none is frozen, how many had none."""
    parameters = list(dict.fromkeys(parameters_of(optimizers)))
    missing = len(parameters) - gradients
    if not gradients or missing <= 0:
        return []
    frozen = last.parameter_names.of([each for each in parameters if not each.requires_grad], optimizers)
    return frozen if len(frozen) == missing else [*frozen, *["(unused)"] * (missing - len(frozen))]


def _readable(optimizers: Sequence[Optimizer]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters whose numbers can be read, and the tensors that hold them: of a shard, the local one."""
    # By exact type: quantized weights and the like need not have the kernel, and a report is not worth an error.
    held = [(each, local(each.detach())) for each in parameters_of(optimizers)]
    found = [(each, values) for each, values in held if type(values) is Tensor and _is_dense_float(values)]
    return [each for each, _ in found], [values for _, values in found]


def _is_dense_float(values: Tensor) -> bool:
    wide = values.is_complex() or (values.is_floating_point() and values.dtype.itemsize >= 2)
    return wide and values.layout is torch.strided and values.device.type != "meta"
