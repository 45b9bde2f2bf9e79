"""Loss scaling in 200 lines: all of it, in plain PyTorch, to read from top to bottom and then to run.

FP16 holds magnitudes from 2**-24 to 65504. Gradients are often smaller, and become zero without a word. So multiply the
loss by a scale: the backward pass is linear, and every gradient becomes larger by that factor. Divide them by it before
the optimizer sees them. What remains is to choose the scale. Too low, and gradients are lost; too high, and they are
infinite. The first is silent and the second is loud: so scalers go as high as they can, and skip a step that overflows.

    loss * scale -> backward -> measure -> apply or skip
         ^                         |
         +----- next state <---- rule

gradscale does the same, bit for bit: a test compares its scales, skips and weights with those of this file. Each part
names the files of `src/gradscale` that do it in full: without waiting for the device, on many ranks, in any framework.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# ---- 1. What a step has seen, and what the scale remembers ------------------------------------ `policies/contract.py`
# Both are values, which nobody changes. A rule is a pure function: it takes a state and what was seen, and returns the
# next state. So it is tested without a model, replayed over a recorded run (`replay/run.py`), and saved as four numbers
# (`engine/saved.py`). No rule knows of PyTorch: the library has each of them once, for every framework.


@dataclass(frozen=True)
class Seen:
    finite: bool  # no gradient is inf or NaN
    loss_finite: bool  # nor was the loss
    amax: float  # largest magnitude of any gradient, unscaled
    norm: float  # Euclidean norm of all gradients, unscaled; 0 if it was not asked for

    @property
    def clean(self) -> bool:
        return self.finite and self.loss_finite


@dataclass(frozen=True)
class State:
    scale: float  # what the next loss is multiplied by
    clean_steps: int = 0  # since the last overflow, or since `dynamic` raised the scale
    peak: float = 0.0  # of `auto`: the unscaled gradient to expect; 0 while none was seen
    ceiling: float = 2.0**126  # of `auto`: the highest scale that overflows allow


Rule = Callable[[State, Seen], State]

# ---- 2. One step ----------------------------------------- all stages in order: `torch/scaler.py`, `torch/step/run.py`


def backward(loss: Tensor, state: State) -> None:
    """Runs the backward pass of the scaled loss."""
    # In float32: FP16 cannot hold 1.0 * 65536. Where several backward passes add up to one step, all must have the same
    # scale, and gradients that an earlier step has left must not be in the sum: `torch/window/window.py`.
    (loss.float() * state.scale).backward()


def measure(grads: Sequence[Tensor], loss: Tensor, scale: float, needs_norm: bool) -> Seen:
    """Reads the gradients, before anyone uses them."""
    # `max` passes on inf and NaN, so the largest magnitude is the check as well. `item` waits for the device, which
    # the library does once or not at all: `torch/step/measure.py`, `kernels/torch.py`. For a clipped step it reads the
    # norm, and from the 17th on estimates amax by it, reading amax itself at every 16th: `engine/measurement.py`.
    amax = torch.stack([grad.abs().max() for grad in grads]).max().item() / scale
    norm = nn.utils.get_total_norm(grads).item() / scale if needs_norm else 0.0
    # A loss that is NaN comes from the forward pass, which has no scale: then the scale is not the cause.
    return Seen(math.isfinite(amax) and math.isfinite(norm), math.isfinite(loss.item()), amax, norm)


def unscale_and_clip(scale: float, norm: float, clip_norm: float | None) -> Tensor:
    """Returns one factor for both, so that gradients are written once."""  # `engine/decide.py`
    unscale = torch.tensor(1.0 / scale)
    if clip_norm is None:
        return unscale
    # By the unscaled norm: a scaled one is larger by the scale, and would leave nothing. 1e-6 as in `clip_grad_norm_`.
    return unscale * (torch.tensor(clip_norm) / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)


def step(rule: Rule, state: State, optimizer: Optimizer, loss: Tensor, clip_norm: float | None) -> tuple[State, Seen]:
    """Updates the weights, or skips. Returns the next state, and what was seen."""
    grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    seen = measure(grads, loss, state.scale, needs_norm=clip_norm is not None)
    # Here ranks agree on what was seen: one that skips alone has other weights from then on. `torch/step/agree.py`
    if seen.clean:
        factor = unscale_and_clip(state.scale, seen.norm, clip_norm)
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()
    # Else nothing moves: an inf would stay in weights and momentum for good, and a lost batch does little harm. A fused
    # optimizer has factor and skip in its kernel: `torch/step/apply.py`. Which parameter it was, and whether the run is
    # stuck: `torch/step/result.py`, `engine/culprits.py`, `engine/health.py`.
    return rule(state, seen), seen


# ---- 3. The classic rule: try, and back off ---------------------------------------------------- `policies/dynamic.py`


def dynamic(
    state: State, seen: Seen, growth_interval: int = 2000, min_scale: float = 1.0, max_scale: float = 2.0**126
) -> State:
    """Doubles the scale after many clean steps, and halves it at an overflow."""
    if not seen.loss_finite:
        return state
    if not seen.finite:
        return replace(state, scale=max(state.scale / 2, min_scale), clean_steps=0)
    if state.clean_steps + 1 < growth_interval:
        return replace(state, clean_steps=state.clean_steps + 1)
    # All it knows is yes or no: it finds a higher scale by waiting, and that one is too high by losing a step.
    return replace(state, scale=min(state.scale * 2, max_scale), clean_steps=0)


# ---- 4. The default rule, `auto`: look, and leave headroom ------------------------------------ `policies/headroom.py`
# Every step shows the largest gradient, and that says what the scale should be. The scale stays below two bounds:
#   top      keeps the peak of the gradients two bits below FP16's maximum, so that one 4 times as large still fits.
#   ceiling  is for what gradients of parameters do not show: those of activations may be larger. An overflow tells so,
#            and puts the ceiling 4 or 12 bits below the scale that failed. Clean steps raise it again.

LIMIT = 65504 / 2.0**2  # what the peak may reach, scaled
LESSON = 2.0**4  # the unit of caution: activation gradients of a GAN were 3 to 5 bits larger than those of parameters
LEAK = 0.002  # the peak follows a larger gradient at once, and forgets it slowly: a bit in 350 steps,
FAST_LEAK = 8 * LEAK  # or in 43 while it is more than two lessons above the gradients, as after one that was huge,
FRESH = 4  # or in one, for so many clean steps from the start or an overflow on: the first gradient may be an outlier
RECOVERY = 2.0**-17  # share of `top` by which a clean step raises the ceiling, to 5 bits below it in some 5,000 steps
HALF = 2.0**20  # of FP16's range: that far below `top` the ceiling doubles, and so high it goes for a first gradient
LOWEST, HIGHEST = 2.0**-24, 2.0**126  # of all scales: below, none helps; above, 1 / scale is no normal float32


def power_of_two(x: float) -> float:
    """Returns the largest power of two up to `x`."""  # `policies/arithmetic.py`
    # A power of two changes no digit of what it multiplies: scaling rounds nothing. Not by `log2`, which rounds.
    return math.ldexp(0.5, math.frexp(x)[1])


def auto(state: State, seen: Seen) -> State:
    """Sets the scale by the largest gradient that it remembers, so that it moves before a step overflows."""
    if not seen.loss_finite:
        return state
    if not seen.finite:
        return after_overflow(state)
    peak, ceiling = state.peak, state.ceiling
    amax = seen.amax if seen.amax >= 2.0**-126 else peak / LESSON**2  # zeros let the peak leak, slowly
    if amax >= 2.0**-126:
        leak = 0.5 if state.clean_steps < FRESH else FAST_LEAK if peak / LESSON**2 > amax else LEAK
        peak = max(amax, peak * (1 - leak))
    # While there were only zeros, the scale may have been too low to see more.
    top, low = (LIMIT / peak, LIMIT / peak / HALF) if peak else (HALF, HALF)
    if ceiling < top:
        ceiling += ceiling if ceiling < low else min(top * RECOVERY, ceiling / LESSON)  # at most a bit in 11 steps
    allowed = top if state.clean_steps else top / LESSON  # one gradient says little
    scale = min(max(power_of_two(min(ceiling, allowed)), LOWEST), HIGHEST)
    return State(scale, state.clean_steps + 1, peak, ceiling)


def after_overflow(state: State) -> State:
    """Lowers ceiling and scale. By how much the scale was too high is not known: inf has no size."""
    learned = state.scale / LESSON  # soon after another, the ceiling was too high by little
    if state.clean_steps >= LESSON or not state.peak:  # else fall so far that what comes back fits, and peaks are seen
        low = LIMIT / state.peak / HALF if state.peak else HALF
        learned = max(state.scale / LESSON**3, min(low, learned))
    ceiling = power_of_two(learned)
    return replace(state, scale=max(ceiling, LOWEST), ceiling=ceiling, clean_steps=0)


# ---- 5. Training in FP16 ------------------------------------------------- the same with gradscale: `torch_minimal.py`


def train(name: str, rule: Rule, state: State, steps: int = 200) -> None:
    """Fits a sine. Prints the steps that moved the scale or were skipped, and what was learned."""
    print(f"{name}\nstep  scale  largest gradient, scaled")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 1))  # in float32: the master weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for number in range(steps):
        x = torch.rand(256, 1) * 4 - 2
        y = torch.sin(2 * x)
        y[0] += 1e13 * (number == 60)  # a broken label: gradients overflow
        x[0] += 1e6 * (number == 120)  # a broken input, which FP16 cannot hold: the loss is NaN, whatever the scale
        with torch.autocast("cpu", dtype=torch.float16):  # matrix products are in FP16, forward and backward
            output = model(x)
        loss = 1e-6 * (output.float() - y).square().mean()  # a small weight, as terms of a loss have: tiny gradients
        backward(loss, state)
        after, seen = step(rule, state, optimizer, loss, clip_norm=1.0)
        optimizer.zero_grad()
        if not seen.clean or after.scale != state.scale:
            what = "applied" if seen.clean else "skipped, overflow" if seen.loss_finite else "skipped, loss not finite"
            was, now = (f"2^{math.log2(each.scale):.0f}" for each in (state, after))
            print(f"{number:4}  {was:5}  {seen.amax * state.scale:<8.2g}  {what}; the next scale is {now}")
        losses += [1e6 * loss.item()] if seen.clean else []
        state = after
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, skipped {steps - len(losses)} of {steps}, scale {state.scale:g}")


if __name__ == "__main__":
    train("no scaling", lambda state, seen: state, State(scale=1.0))
    train("\ndynamic", lambda state, seen: dynamic(state, seen, growth_interval=50), State(scale=2.0**40))
    train("\nauto", auto, State(scale=16.0))
