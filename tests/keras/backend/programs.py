"""Random training programs: an optimizer, a policy, variables, and steps of which some go wrong.

Every number is a small multiple of a power of two, so that scaling, unscaling and what `SGD` does are exact.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import keras
import numpy as np
from tests.keras.backend.helpers import BACKEND, INF, NAN

from gradscale import Dynamic, Headroom, Histogram, NoScaling, Policy, Static, preset

EXACT = {"SGD": {}, "momentum": {"momentum": 0.5}, "nesterov": {"momentum": 0.5, "nesterov": True}}
"""Optimizers whose arithmetic is exact on such numbers, for a few steps: all are `SGD`."""

OTHERS = ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion", "Adafactor", "Lamb")
"""Optimizers that round: their results are compared within the error of their type."""

NARROW = (*EXACT, "RMSprop", "Adagrad")
"""Optimizers that Keras itself can run on variables of 16 bits, on every backend."""

WAYS = ("apply", "apply_if_finite", "apply_gradients", "compiled")
"""How a step is called."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
        grads: unscaled gradients, in float64; None where a variable has none.
        fault: what replaces one element of a scaled gradient; None where nothing goes wrong.
        place: which gradient that is, counted among those there are.
        loss: the unscaled loss, which only `apply_if_finite` can be given.
        learning_rate: what the learning rate is set to before; None leaves it.
        reload: save the optimizer before, and load it into a new one.
    """

    grads: list[Any]
    fault: float | None
    place: int
    loss: float
    learning_rate: float | None
    reload: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A training program.

    Attributes:
        optimizer: name of the inner optimizer.
        settings: its settings.
        policy: the rule for the scale; None is Keras's own.
        initial_scale: for Keras's own rule.
        starts: first values of the variables.
        dtype: type of the variables.
        grad_dtype: type of the gradients; in FP16 a large scale makes them overflow.
        way: how a step is called.
        steps: the steps.
    """

    optimizer: str
    settings: dict[str, Any]
    policy: Policy | None
    initial_scale: float
    starts: list[Any] = field(repr=False)
    dtype: str
    grad_dtype: str
    way: str
    steps: list[Step] = field(repr=False)

    @property
    def exact(self) -> bool:
        """Whether all arithmetic is exact, so that every bit is known."""
        rounding = {"clipnorm", "global_clipnorm"} & self.settings.keys()
        return self.optimizer in EXACT and not rounding and self.dtype in ("float32", "float64")

    def inner(self) -> Any:
        """Returns a new inner optimizer."""
        if self.optimizer in EXACT:
            return keras.optimizers.SGD(**EXACT[self.optimizer], **self.settings)
        return getattr(keras.optimizers, self.optimizer)(**self.settings)

    def variables(self) -> list[Any]:
        """Returns new variables with their first values."""
        return [keras.Variable(start, dtype=self.dtype, name=f"w{place}") for place, start in enumerate(self.starts)]


def random_program(seed: int) -> Program:
    """Returns the program of a seed."""
    random = Random(seed)
    optimizer = random.choice(list(EXACT)) if random.random() < 0.6 else random.choice(OTHERS)
    policy = _policy(random)
    # Compiling takes a second; the other ways a few milliseconds.
    way = "compiled" if random.random() < 0.15 else random.choice(WAYS[:-1])
    shapes = [random.choice(((), (3,), (2, 2), (1, 5))) for _ in range(random.randint(1, 2))]
    starts = [_dyadic(random, shape) for shape in shapes]
    steps = [_step(random, shapes, policy, way) for _ in range(random.randint(3, 6))]
    dtype = random.choice(("float32",) * 8 + ("float16", "bfloat16", "float64"))
    if (dtype == "float64" and BACKEND == "jax") or (dtype in ("float16", "bfloat16") and optimizer not in NARROW):
        dtype = "float32"
    return Program(
        optimizer,
        _settings(random, optimizer),
        policy,
        2.0 ** random.randint(-4, 18),
        starts,
        dtype,
        random.choice(("float32", "float32", "float16")),
        way,
        steps,
    )


def _dyadic(random: Random, shape: tuple[int, ...]) -> Any:
    """Returns multiples of 1/4 between -2 and 2."""
    size = int(np.prod(shape))
    return np.array([random.randint(-8, 8) / 4 for _ in range(size)], np.float64).reshape(shape)


def _policy(random: Random) -> Policy | None:
    scale = 2.0 ** random.randint(-4, 18)
    growth: dict[str, Any] = {"growth_interval": random.randint(1, 3), "hysteresis": random.randint(1, 2)}
    return random.choice(
        (
            None,
            Dynamic(init_scale=scale, min_scale=2.0**-6, **growth),
            Dynamic(init_scale=scale, min_scale=2.0**-6, refill="clean", **growth),
            Dynamic(init_scale=scale, min_scale=2.0**-6, growth_factor=4.0, backoff_factor=0.25, growth_interval=2),
            Static(scale),
            Headroom(init_scale=scale),
            Histogram(init_scale=scale),
            NoScaling(),
            preset("torch", init_scale=scale, growth_interval=2),
            preset("deepspeed", init_scale=max(scale, 1.0), scale_window=2),
        )
    )


def _settings(random: Random, optimizer: str) -> dict[str, Any]:
    """Returns settings that every optimizer takes."""
    settings: dict[str, Any] = {"learning_rate": 2.0 ** -random.randint(1, 3)}
    if random.random() < 0.4:
        settings[random.choice(("clipnorm", "global_clipnorm", "clipvalue"))] = random.choice((0.5, 1.0, 2.0))
    if random.random() < 0.3:
        settings["gradient_accumulation_steps"] = 2
    if random.random() < 0.3:
        settings |= {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": random.choice((None, 2))}
    if random.random() < 0.2 and optimizer != "Adafactor":
        settings["weight_decay"] = 0.5
    if random.random() < 0.2:
        rates = [settings["learning_rate"], 0.25, 0.125]
        settings["learning_rate"] = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], rates)
    return settings


def _step(random: Random, shapes: list[tuple[int, ...]], policy: Policy | None, way: str) -> Step:
    grads = [_dyadic(random, shape) for shape in shapes]
    if len(grads) > 1 and random.random() < 0.2:
        grads[random.randrange(len(grads))] = None
    # `NoScaling` checks nothing, as no scale could have caused it.
    goes_wrong = random.random() < 0.35 and not isinstance(policy, NoScaling)
    return Step(
        grads,
        random.choice((INF, -INF, NAN)) if goes_wrong else None,
        random.randrange(len(grads)),
        random.choice((INF, NAN)) if way == "apply_if_finite" and random.random() < 0.1 else 1.0,
        random.choice((None, None, None, 0.25)),
        random.random() < 0.15,
    )
