"""How often the compiled step reads the gradients: once for each size that is asked, and once to unscale."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from gradscale import Dynamic, NoScaling, Policy
from gradscale.jax import Scaler, apply, value_and_grad
from gradscale.policies.headroom import Headroom

SHAPE = "64,96"


def optimized(function: Any, *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text() or ""


def compiled(policy: Policy, **options: Any) -> str:
    """Returns the optimized program of a step. The one gradient has a shape that nothing else has."""
    scaler = Scaler(policy)

    def step(state: Scaler, gradient: Any) -> Any:
        return state.step(gradient, **options)

    return optimized(step, scaler, jnp.ones((64, 96)))


def reads(program: str) -> tuple[int, int]:
    """Returns how many operations of the main program take the gradient: those that reduce it, and the others."""
    entry = program[program.index("\nENTRY") :]
    parameter = re.search(rf"(%\S+) = f32\[{SHAPE}\]\S* parameter\(", entry)
    assert parameter is not None
    takes = re.compile(re.escape(parameter[1]) + r"[,)]")
    lines = [line for line in entry.splitlines() if takes.search(line.split(" = ", 1)[-1])]
    reducing = [line for line in lines if not re.search(rf" = f32\[{SHAPE}\]", line)]
    return len(reducing), len(lines) - len(reducing)


@functools.cache
def fuses() -> bool:
    """Returns whether XLA computes magnitudes inside of a sum. JAX 0.9 and older store them first, on a CPU."""
    return reads(optimized(lambda gradient: jnp.sum(jnp.abs(gradient)), jnp.ones((64, 96)))) == (1, 0)


def counted(program: str, expected: tuple[int, int]) -> tuple[int, int]:
    """Returns the reads of a program. Where XLA does not fuse, only their sum is known, and returned as `expected`."""
    found = reads(program)
    return expected if not fuses() and sum(found) == sum(expected) else found


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        (Dynamic(), {}, (1, 1)),
        (Dynamic(), {"clip_norm": 1.0}, (1, 1)),
        (Dynamic(), {"norm": True}, (1, 1)),
        (Headroom(), {}, (1, 1)),
        (Headroom(), {"clip_norm": 1.0}, (2, 1)),
        (NoScaling(), {}, (0, 1)),
        (NoScaling(), {"clip_norm": 1.0}, (1, 1)),
    ],
)
def test_gradients_are_read_once_for_each_size_that_is_asked_and_once_to_unscale(
    policy: Policy, options: Any, expected: tuple[int, int]
) -> None:
    assert counted(compiled(policy, **options), expected) == expected


def test_a_second_read_is_counted() -> None:
    def twice(gradient: Any) -> Any:
        return jnp.max(jnp.abs(gradient)), jnp.sum(gradient**2), gradient * 2

    assert counted(optimized(twice, jnp.ones((64, 96))), (2, 1)) == (2, 1)
    assert counted(optimized(twice, jnp.ones((64, 96))), (1, 1)) != (1, 1)


def test_a_whole_step_calls_nothing_on_the_host() -> None:
    tx = optax.adam(1e-2)

    def step(state: Scaler, weight: Any) -> Any:
        _, grads, state, result = value_and_grad(lambda w: jnp.sum(w**2), clip_norm=1.0, retries=2)(state, weight)
        return apply(tx, grads, tx.init(weight), weight, result), state

    program = optimized(step, Scaler(), jnp.ones(4))
    assert not re.search(r"callback|outfeed|infeed|send|recv", program)
