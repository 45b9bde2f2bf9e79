"""Stage two, agree: what was measured becomes the facts of the step, the same on all ranks that share the scale.

With one rank there is nothing to agree on, and nothing here is called in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gradscale.engine.measurement import Measurement
from gradscale.policies.contract import Seen
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, count_elements
from gradscale.torch.host import Facts, Rule, filled
from gradscale.torch.ranks.ddp import Reduced, check_joins
from gradscale.torch.ranks.round import Packet, Received, Rounds
from gradscale.torch.step.apply import StepPlan, folds
from gradscale.torch.step.measure import measure
from gradscale.torch.step.on_device import seen_on_device
from gradscale.torch.window.window import Window

Optimizer = torch.optim.Optimizer


def check_agree(agree: str) -> str:
    """Returns when ranks send a round, or raises if it is neither of the two names."""
    if agree not in ("auto", "always"):
        raise ValueError(f'`agree` must be "auto" or "always". Received: {agree!r}.')
    return agree


class Agreement:
    """Whether a step needs a round of the ranks, and what all of them have seen of it.

    A step has one round at most. Under plain DDP a step that is applied has none, after the first: the reduced
    gradients are the same on every rank, and all of them make the same decision.

    Attributes:
        rounds: the ranks that decide together.
        compared: whether the scales were compared, in a round.
    """

    def __init__(self, rounds: Rounds, modules: Sequence[nn.Module] = (), *, always: bool = False) -> None:
        """Starts before the first step.

        Args:
            rounds: as the attribute.
            modules: those trained.
            always: send a round at every step, also where the gradients are the same on every rank.
        """
        self.rounds = rounds
        self.compared = False
        self._reduced = Reduced(modules)
        self._always = always

    def begin(self, optimizers: Sequence[Optimizer], join: Any = None) -> bool:
        """Begins a step, and returns whether this rank decides alone.

        Raises what the last step has found on an accelerator, where it could not be read at once; and if ranks outside
        of the group hold shards. `join` is what torch's `Join` has set on the scaler.
        """
        self.rounds.check_shards(optimizers)
        if self.rounds.ranks == 1:
            return True
        self.rounds.begin()
        check_joins(self._reduced.joining, join)
        return False

    def agree(self, plan: StepPlan, window: Window) -> Facts:
        """Returns the facts of the step, the same on every rank.

        Gradients that overflowed outside of the step count as its own, and then a loss made from them is not the cause.
        Does not synchronize with the device, except where the plan says that the host waits.

        Raises:
            ScaleDesync: the ranks have different scales.
            RuntimeError: a norm is needed, and plain gradients differ between ranks; or their arguments do.
        """
        if plan.kernel is not None:
            self.compared = True
            return seen_on_device(plan, window, rounds=self.rounds)
        weights = None if plan.edge is None else self.rounds.weights(plan.gradients)
        measurement = measure(plan, weights)
        reduced = self._is_reduced(plan, window)
        if reduced:
            # The same on every rank, as the gradients are: all of them send the round, or none does.
            loss_finite, overflowed = window.flags()
            own = measurement.seen(plan.scale, loss_finite, torch, overflowed)
            seen = _on_host(own, plan.scale.device)
            if seen.finite and self.compared:
                # A loss is known on its own rank alone, which must not skip what the others apply.
                seen = replace(seen, loss_finite=np.bool_(True))
                return Facts(seen, sizes=measurement.sizes, attempted=bool(plan.gradients))
        received = send_round(self.rounds, plan, window, measurement)
        self.compared = True
        seen = received.seen(plan.scale)
        if reduced:
            seen = replace(seen, loss_finite=seen.loss_finite | seen.finite)  # as above
        return agreed_by(seen, measurement.sizes, _any_gradients(received), plan)

    def follow(self, rule: Rule, device: torch.device, then: Callable[..., None]) -> bool:
        """Takes part in a step of other ranks, on a rank that has no batches left, and updates its scale as they do.

        Returns whether there were gradients.
        """
        rule.device = rule.device or device
        scale = rule.scale
        received = self.rounds.follow(scale)
        self.compared = True
        seen = _on_host(received.seen(scale), scale.device)
        attempted, norm = _any_gradients(received), bool(received.packet.asks_norm)
        if attempted:
            estimates = norm and "amax" in rule.policy.needs
            rule.follow(Facts(seen), then, estimates_amax=estimates, measured=received.amax is not None)
        if not (attempted and seen.finite and seen.loss_finite):
            self.rounds.culprits((), device)
        return attempted

    def norm(self, gradients: Gradients, measurement: Measurement, scale: Tensor) -> Tensor:
        """Returns the norm over all ranks of gradients under `NoScaling`. Every rank must call it.

        It has a round unless DDP has reduced the gradients.
        """
        reduced, group = self._reduced, self.rounds.group
        if self.rounds.ranks > 1 and (reduced.joining or reduced.holds_for(gradients.optimizers, group)):
            return cast(Tensor, measurement.norm)
        return self.rounds.norm(gradients, measurement, scale)

    def _is_reduced(self, plan: StepPlan, window: Window) -> bool:
        """Returns whether DDP has reduced all gradients, so that every rank makes the same decision from them alone."""
        # Other ranks may know nothing of an overflow that was noted outside of the step.
        noted = window.unscaled is not None or any(marked for marked, _ in window.notes)
        if self._always or not window.synced or noted:
            return False
        # On an accelerator not if a fused kernel gates the update: the host would have to wait for the gradients.
        optimizers = plan.gradients.optimizers
        if not host.in_host_memory(plan.scale.device) and any(map(folds, optimizers)):
            return False
        return self._reduced.holds_for(optimizers, self.rounds.group)


SEEN = ("finite", "loss_finite", "amax", "norm", "upper_share")
KINDS: Any = (np.bool_, np.bool_, np.float32, np.float32, np.float32)
"""The fields of `Seen`, and their types."""


def agreed_by(
    seen: Seen, sizes: Tensor | None, attempted: bool, plan: StepPlan, *, gates_on_loss: bool = True
) -> Facts:
    """Returns what ranks have agreed on, from tensors that are the same on all of them."""
    device = plan.scale.device
    if plan.waits:
        return Facts(_on_host(seen, device), sizes=sizes, attempted=attempted)
    return Facts(
        copy=host.HostCopy(_vector(seen, device)),
        read=_seen,
        sizes=sizes,
        attempted=attempted,
        norm=lambda: seen.norm,
        found_inf=lambda: (~(seen.finite & seen.loss_finite if gates_on_loss else seen.finite)).float(),
    )


def _on_host(seen: Seen, device: torch.device) -> Seen:
    return _seen(_vector(seen, device).tolist())  # type: ignore[arg-type]


def _vector(seen: Seen, device: torch.device) -> Tensor:
    found = [getattr(seen, name) for name in SEEN]
    return torch.stack([each.float() if isinstance(each, Tensor) else filled(float(each), device) for each in found])


def _seen(numbers: list[float]) -> Seen:
    return Seen(*(kind(number) for kind, number in zip(KINDS, numbers, strict=True)))


def send_round(rounds: Rounds, plan: StepPlan, window: Window, measurement: Measurement) -> Received:
    """Returns what all ranks have seen of a step, in one round, or raises what it shows. Does not synchronize."""
    gradients = plan.gradients
    loss_finite, overflowed = window.flags()
    own = measurement.seen(plan.scale, loss_finite, torch, overflowed)
    if plan.edited and window.unscaled is not None:
        amax, share = window.unscaled.sizes()
        own = replace(own, amax=torch.where(own.finite, amax, torch.inf), upper_share=share)
    counted = plan.edited or plan.edge is not None
    elements = count_elements(gradients.values, rounds.weights(gradients)) if counted else 0.0
    packet = Packet(
        bounds=plan.bounds,
        bounds_squared=plan.bounds**2,
        gradients=float(len(gradients) > 0),
        bad=1.0 - own.finite.double(),
        bad_loss=1.0 - loss_finite.double(),
        above=own.upper_share * elements,
        elements=elements,
    )
    # 0 where it is not known: an inf would be the maximum of all ranks.
    amax = torch.where(own.finite, own.amax, 0.0) if plan.finds_amax else None
    if plan.norm:
        return rounds.send_with_norm(packet, amax, window.scale, gradients, measurement, plan.scale)
    return rounds.send(packet, amax, window.scale)


def _any_gradients(received: Received) -> bool:
    """Returns whether a rank has gradients; True where reading it would synchronize."""
    gradients = received.packet.gradients
    return not host.in_host_memory(gradients.device) or bool(gradients)
