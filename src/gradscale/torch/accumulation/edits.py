"""`LossScaler.unscaled`: gradients divided by the scale before the step, for the user's edits."""

from typing import cast

import torch
from torch import Tensor

from gradscale.engine.plan import Plan
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies
from gradscale.torch.accumulation.window import Window
from gradscale.torch.checks import refuse_narrow, refuse_unnamed
from gradscale.torch.step.apply import multiply
from gradscale.torch.step.gradients import Gradients, Names
from gradscale.torch.step.measure import measure_sizes


def unscale(scaled: Gradients, window: Window, policy: Policy, names: Names) -> None:
    """Divides gradients by the scale in place, and notes in the window that they are, and how large they were.

    One pass to measure them and one to divide. Does not synchronize with the device.
    """
    refuse_narrow("`unscaled`", scaled.optimizers, names)
    found = measure_sizes(scaled.values, window.scale.device, edge=Plan.of(policy).edge, half=True)
    share = torch.zeros_like(window.scale) if found.upper_share is None else found.upper_share
    # Noted before the edits: clipping, for instance, may make a non-finite gradient finite.
    window.note_overflow(~found.finite(window.scale, torch))
    if multiplies(policy):
        multiply(scaled.values, 1.0 / window.scale)
    window.unscaled.note(scaled, cast(Tensor, found.amax) / window.scale, share)


def unscale_rest(gradients: Gradients, window: Window, policy: Policy, names: Names) -> None:
    """Unscales those gradients of a step that `unscaled` has not, if there are others that it has."""
    scaled = window.unscaled.rest_of(gradients)
    if 0 < len(scaled) < len(gradients):
        # Of a group that was added since. An optimizer that was not named is an error: the edits missed it.
        refuse_unnamed(window, scaled)
        unscale(scaled, window, policy, names)
