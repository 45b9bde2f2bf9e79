"""The same training without loss scaling: a plain loop in numpy, or plain optax, that skips the bad steps."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.jax.fuzz.program import Feed, Setup

INIT_SCALE, GROWTH_INTERVAL, HYSTERESIS = 256.0, 2, 2


@dataclass
class Rule:
    """The scale, by a rule written out again: doubled after two clean steps, halved after an overflow."""

    policy: str
    scale: float = INIT_SCALE
    clean: int = 0
    credits: int = HYSTERESIS

    def __post_init__(self) -> None:
        self.moves = self.policy in ("dynamic", "hysteresis")
        self.credits = HYSTERESIS if self.policy == "hysteresis" else 1

    def back_off(self) -> None:
        self.clean = 0
        if self.moves:
            self.scale /= 2

    def overflow(self) -> None:
        self.clean, self.credits = 0, max(self.credits - 1, 0)
        if self.moves and self.credits == 0:
            self.scale /= 2

    def applied(self) -> None:
        self.clean += 1
        if self.moves and self.clean == GROWTH_INTERVAL:
            self.scale, self.clean = self.scale * 2, 0
            self.credits = HYSTERESIS if self.policy == "hysteresis" else 1


def step_rule(rule: Rule, spikes: list[float], bad_losses: list[float], retries: int) -> bool:
    """Moves the scale by one step; returns whether the step is applied."""
    if not np.isfinite(bad_losses).all():
        return False

    def overflows() -> bool:
        return not np.isfinite(np.float32(sum(spikes)) * np.float32(rule.scale))

    with np.errstate(over="ignore", invalid="ignore"):
        before = (rule.scale, rule.clean)
        for _ in range(retries if rule.moves else 0):
            if overflows():
                rule.back_off()
        if overflows():
            rule.scale, rule.clean = before
            rule.overflow()
            return False
    rule.applied()
    return True


class Plain:
    """Weights that are trained without a scale: exact in float32 where the setup is, else by optax itself."""

    def __init__(self, setup: Setup, feed: Feed) -> None:
        self.setup = setup
        self.weights = dict(feed.weights)
        self.trained = [name for name in setup.leaves if name not in ("frozen", "count")]
        self.sum = self._zeros()
        self.waiting = 0
        self.momentum = self._zeros()
        self.state: Any = None if setup.exact else plain_optimizer(setup.optimizer).init(self._wide())

    def step(self, batches: list[dict[str, Any]], spikes: list[float]) -> None:
        grads: dict[str, Any] = {name: sum(_wide(batch[name]) for batch in batches) for name in self.trained}
        grads["a"] = grads["a"] + np.array([sum(spikes), 0, 0, 0], np.float32)
        if self.setup.clip_norm is not None:
            # All gradients count, those of frozen parameters too.
            every = [sum(_wide(batch[name]) for batch in batches) for name in self.setup.leaves if name != "count"]
            norm = np.sqrt(sum(np.square(np.abs(np.complex128(grad))).sum() for grad in every))
            factor = min(1.0, self.setup.clip_norm / (norm + 1e-6))
            grads = {name: grad * np.float32(factor) for name, grad in grads.items()}
        self.sum = {name: self.sum[name] + grad for name, grad in grads.items()}
        self.waiting += 1
        if self.waiting == self.setup.every:
            self._update({name: total / np.float32(self.waiting) for name, total in self.sum.items()})
            self.sum, self.waiting = self._zeros(), 0

    def _update(self, grads: dict[str, Any]) -> None:
        if self.setup.exact:
            updates = {name: np.float32(-0.25) * self._direction(name, grad) for name, grad in grads.items()}
        else:
            found, self.state = plain_update(self.setup.optimizer)(grads, self.state, self._wide())
            updates = jax.tree.map(np.asarray, found)
        for name, update in updates.items():
            self.weights[name] = (_wide(self.weights[name]) + update).astype(self.weights[name].dtype)

    def _direction(self, name: str, grad: Any) -> Any:
        if self.setup.optimizer == "sgd":
            return grad
        self.momentum[name] = grad + np.float32(0.5) * self.momentum[name]
        return (
            self.momentum[name] if self.setup.optimizer == "momentum" else grad + np.float32(0.5) * self.momentum[name]
        )

    def _zeros(self) -> dict[str, Any]:
        return {name: np.zeros_like(_wide(self.weights[name])) for name in self.trained}

    def _wide(self) -> dict[str, Any]:
        return {name: jnp.asarray(_wide(self.weights[name])) for name in self.trained}


def plain_optimizer(name: str) -> optax.GradientTransformation:
    """Returns the optimizer of this name."""
    return {
        "sgd": lambda: optax.sgd(0.25),
        "momentum": lambda: optax.sgd(0.25, momentum=0.5),
        "nesterov": lambda: optax.sgd(0.25, momentum=0.5, nesterov=True),
        "adam": lambda: optax.adam(0.1),
        "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
        "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.5),
        "lion": lambda: optax.lion(0.25, b1=0.5, b2=0.5),
    }[name]()


@functools.cache
def plain_update(name: str) -> Any:
    """Returns its update, compiled."""
    return jax.jit(plain_optimizer(name).update)


def _wide(array: Any) -> Any:
    return array.astype(np.complex64 if np.iscomplexobj(array) else np.float32)
