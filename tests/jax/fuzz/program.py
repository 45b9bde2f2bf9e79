"""A random training program: what is compiled once (`Setup`), and what it is fed with (`Feed`)."""

import random
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

STEPS = 8

SHAPES = {"a": (4,), "half": (3,), "brain": (2, 2), "complex": (2,), "empty": (0, 3), "frozen": (2,), "count": ()}

DTYPES = {"half": "float16", "brain": "bfloat16", "complex": "complex64", "count": "int32"}

EXACT = ("sgd", "momentum", "nesterov")
"""Optimizers whose arithmetic is exact on these programs: every factor is a power of two."""

OPTIMIZERS = (*EXACT, "adam", "adamw", "rmsprop", "lion")


@dataclass(frozen=True)
class Setup:
    """What a program is made of.

    Attributes:
        way: `value_and_grad` and `apply`, `Scaler.step` by hand and `apply`, or `scaled`.
        mode: eager, or compiled step by step, or the whole run in a `scan`.
        optimizer: its name.
        policy: `static`, `dynamic`, `hysteresis`, `headroom` or `none`.
        leaves: the names of the parameters.
        micro: micro-batches whose gradients are added up by hand before a step.
        every: micro-batches that `optax.MultiSteps` accumulates; 1 without it.
        clip_norm: a bound on the norm; a large one clips nothing.
        retries: retries of the backward pass.
        gate: the gate of `apply`.
        wide_state: whether the state of the optimizer is made in float32.
    """

    way: str
    mode: str
    optimizer: str
    policy: str
    leaves: tuple[str, ...]
    micro: int
    every: int
    clip_norm: float | None
    retries: int
    gate: Any
    wide_state: bool

    @property
    def exact(self) -> bool:
        """Whether weights can be compared bit by bit."""
        return self.optimizer in EXACT and self.clip_norm in (None, 1e6)


@dataclass(frozen=True)
class Feed:
    """What a program is fed with.

    Attributes:
        weights: the first weights: small integers.
        batches: for each step and micro-batch, the gradient of every leaf: small integers.
        spikes: for each step and micro-batch, what is added to a gradient: 0, inf, NaN, or 2**120 or 2**121,
            which are finite unscaled, and an overflow of float32 at a scale of 256 or 128 and more.
        bad_losses: for each step and micro-batch, 0, or the NaN that is added to the loss alone.
        reloads: the steps before which everything is saved and loaded.
    """

    weights: dict[str, np.ndarray]
    batches: list[list[dict[str, np.ndarray]]]
    spikes: list[list[float]]
    bad_losses: list[list[float]]
    reloads: frozenset[int]


def draw_setup(seed: int) -> Setup:
    """Returns a setup in which nothing is refused."""
    rng = random.Random(seed)
    way = rng.choice(("value_and_grad", "step", "scaled"))
    policy = rng.choice(("static", "dynamic", "dynamic", "hysteresis", "headroom", "none"))
    optimizer = rng.choice(OPTIMIZERS) if rng.random() < 0.5 else rng.choice(EXACT)
    narrow = [] if policy == "headroom" or optimizer not in ("sgd", "adam") else ["half", "brain"]
    pool = [*narrow, "complex", "empty", "frozen"] if optimizer != "lion" else ["empty", "frozen"]
    pool += ["count"] if way == "value_and_grad" else []
    every = rng.choice((1, 1, 2))
    if every > 1 and "complex" in pool:
        pool.remove("complex")  # `optax.MultiSteps` keeps the real part only
    mode = rng.choice(("eager", "jit", "jit", "scan", "scan"))
    return Setup(
        way=way,
        mode=mode,
        optimizer=optimizer,
        policy=policy,
        leaves=("a", *(name for name in pool if rng.random() < 0.5)),
        micro=rng.choice((1, 2)) if way == "step" else 1,
        every=every,
        clip_norm=None if every > 1 else rng.choice((None, None, 1e6, 2.0)),
        # Outside of `jit` the loop of the retries is compiled at every step.
        retries=rng.choice((0, 2)) if way == "value_and_grad" and mode != "eager" else 0,
        gate=rng.choice(("cond", "where")),
        wide_state=optimizer == "adam" or rng.random() < 0.5,
    )


def draw_feed(setup: Setup, seed: int) -> Feed:
    """Returns the numbers of one run of `setup`."""
    rng = np.random.default_rng(seed)
    faults = [0.0] if setup.policy == "none" else [np.inf, -np.inf, np.nan]
    # The square of 2**120 overflows: with a norm it would count as an overflow at any scale.
    if setup.policy == "dynamic" and setup.clip_norm is None and setup.exact and setup.every == 1:
        faults += [2.0**120, 2.0**121]

    def integers(name: str, bound: int) -> np.ndarray:
        parts = rng.integers(-bound, bound + 1, (2, *SHAPES[name])).astype(np.float32)
        whole = parts[0] + 1j * parts[1] if name == "complex" else parts[0]
        return np.asarray(whole).astype(jnp.dtype(DTYPES.get(name, "float32")))

    def every_batch(draw: Any) -> list[list[Any]]:
        return [[draw() for _ in range(setup.micro)] for _ in range(STEPS)]

    return Feed(
        weights={name: integers(name, 4) for name in setup.leaves},
        batches=every_batch(lambda: {name: integers(name, 4) for name in setup.leaves}),
        spikes=every_batch(lambda: float(rng.choice(faults)) if rng.random() < 0.25 else 0.0),
        bad_losses=every_batch(lambda: np.nan if setup.policy != "none" and rng.random() < 0.1 else 0.0),
        reloads=frozenset(int(step) for step in rng.integers(0, STEPS, 2)),
    )
