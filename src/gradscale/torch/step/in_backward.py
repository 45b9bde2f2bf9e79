"""Optimizers that are stepped in the backward pass: each parameter as soon as it has its gradient, which is cleared."""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import largest, share_above, single
from gradscale.torch import host
from gradscale.torch.checks import check_step, some, warn_of_half
from gradscale.torch.gradients import Gradients, collect, parameters_of
from gradscale.torch.host import Facts, filled
from gradscale.torch.step.agree import agreed_by
from gradscale.torch.step.apply import Gate, StepPlan, apply, decide, edit, folds, plan_step
from gradscale.torch.step.measure import nonfinite
from gradscale.torch.step.on_device import followed, plan_on_device
from gradscale.torch.step.result import StepResult
from gradscale.torch.step.run import Stages
from gradscale.torch.window.window import Window


class InBackward(Stages):
    """Runs the stages of a step in hooks of parameters, and makes one step of the rule of every backward pass."""

    def __init__(self, after: Stages) -> None:
        self.__dict__ |= vars(after)
        self._after = after
        self._owners: dict[Tensor, torch.optim.Optimizer] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self._after,)  # copies of parameters have no hooks

    def register(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Registers a hook on every parameter of `optimizers`."""
        check_step(optimizers, None, None)
        owners = {each: optimizer for optimizer in optimizers for each in parameters_of([optimizer])}
        held = Counter([*self._owners, *parameters_of(optimizers)])
        if wrong := [p for p in owners if not p.requires_grad or held[p] > 1 or p.device != next(iter(held)).device]:
            raise ValueError(
                "`step_in_backward` takes parameters that require gradients, each once, all on one device. "
                f"Received: {some(self._names, wrong, optimizers)}. Leave them out of its optimizers."
            )
        warn_of_half(Gradients(list(owners), [], [], optimizers), self._names)
        self._owners |= owners
        self._windows.watched.remember(optimizers)
        for parameter in owners:
            parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[attr-defined]

    def _step(self, parameter: Tensor) -> None:
        """Steps the optimizer of a parameter if all is finite so far, and clears its gradient."""
        optimizer = self._owners[parameter]
        if not self._rule.reads.checks:
            optimizer.step()
            parameter.grad = None
            return
        window, gradients = self.ready([optimizer]), collect([optimizer])
        its_own, in_engine = list(map(id, gradients.parameters)), torch._C._current_graph_task_id() != -1
        if not (its_own == [id(parameter)] and in_engine and self._agreement.begin([optimizer])):
            raise RuntimeError(
                f"`step_in_backward` takes gradients one by one, in one process. Received: {self._rounds.ranks} ranks, "
                f"gradients of {some(self._names, gradients.parameters, [optimizer])}. Leave out hooks that step, "
                "`retries` and `closure`; give parameters that were added an optimizer of their own."
            )
        if window.at_end is None:
            self._begin(window)
        plan, values, device = self._plan(gradients, window), gradients.values, window.scale.device
        self._parameters.append(parameter)
        self._sizes.append(largest(values, device))
        if plan.edge is not None:
            self._above.append(share_above(values, filled(plan.edge, device), device) * parameter.numel())
        # As divided, in the type of the gradient: by a scale below 1, a finite one may leave its range.
        nonfinite((self._sizes[-1] * self._unscale).to(values[0].dtype.to_real()), self._flag)
        self._applied = not self._flag.item() if self._waits else None
        gate = decide(plan, Facts(), self._applied, lambda: self._flag)
        try:
            if plan.edits:
                edit(plan, gate)
            apply(plan, gate)
        finally:  # whatever interrupts it: no other step can use the gradient again
            parameter.grad = None

    def _begin(self, window: Window) -> None:
        """Begins to step in the backward pass of a window."""
        device, window.at_end = window.scale.device, self._end
        self._optimizers = list(dict.fromkeys(self._owners.values()))
        self._memory.begin(self._optimizers, device)
        self._waits = host.in_host_memory(device) or not all(map(folds, self._optimizers))
        self._unscale, (self._loss_finite, overflowed) = 1.0 / window.scale, window.flags()
        # Set from the first number on that is not finite: the gradients that follow are made from it.
        self._flag = (~self._loss_finite | overflowed).float()
        self._parameters, self._sizes, self._above = list[Tensor](), list[Tensor](), list[Tensor]()

    def _plan(self, gradients: Gradients, window: Window) -> StepPlan:
        plan = None if self._waits else plan_on_device(self._rule, gradients, window, sample=True)
        return plan or plan_step(self._rule, gradients, window.scale, window.divisor, 0, sample=True, divide=False)

    def _end(self, window: Window) -> None:
        """Makes one step of the rule of all gradients of a backward pass, and keeps its result."""
        self._windows.open, sizes = None, torch.cat(self._sizes)
        gone = [each.new_empty(0) for each in self._parameters]  # for the gradients, of which the sizes are known
        plan = self._plan(Gradients(self._parameters, gone, gone, self._optimizers), window)
        share = torch.stack(self._above).sum() / sum(map(Tensor.numel, self._parameters)) if self._above else None
        if plan.kernel is not None and not plan.kernel.shrinks:
            notes = [note.reshape(1) for _, note in window.notes]
            numbers = torch.cat([sizes, *notes, *([] if share is None else [share.reshape(1)])])
            facts: Facts = followed(plan.kernel, window, numbers, 0, len(sizes), len(notes), None)
            facts.sizes = sizes
        else:
            finite = (self._flag == 0) | (~self._loss_finite & torch.isfinite(total := sizes.amax()))
            measured = Measurement(sizes, total, amax=single(total), upper_share=share)
            facts = agreed_by(measured.seen_with(finite, window.scale, self._loss_finite, torch), sizes, True, plan)
        for guard in self.buffers:
            guard.settle(self._flag == 0)
        gate = Gate(self._applied, None if self._waits else self._flag, None, None)
        result = StepResult(self._rule, plan, window, facts, gate, sizes=facts.sizes, names=self._names)
        self._rule.follow(facts, partial(self._memory.note, result, facts, False, True))
        self._memory.keep(result, self._optimizers)
