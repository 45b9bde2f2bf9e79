"""The adapters that the conformance table runs on: what each must offer, and which are asked for.

To join, write a module with an `ADAPTER` beside this one and register it in `REGISTERED`.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from tests.conformance.reported import Reported

from gradscale import Policy

Array = np.ndarray[Any, Any]

VARIABLE = "GRADSCALE_ADAPTERS"
"""Environment variable with the adapters to run, as in `numpy,torch`. Without it, all whose framework is installed."""

Difference = Literal["losses", "no grads", "no scaling", "norm", "infinite norm", "result", "state", "metrics"]
"""What a drop-in may do as its peer does, in place of what the table says:

    losses: it applies finite gradients, whatever the loss.
    no grads: a step without gradients raises.
    no scaling: `NoScaling` switches it off, so that nothing is counted.
    norm: the user clips, so its result has no norm.
    infinite norm: the framework clips, and an infinite norm makes every gradient NaN.
    result: it returns no result.
    state: it keeps no more than the scale and the clean steps.
    metrics: it has no `metrics`.

`test_differences` proves each of them.
"""

Table = Literal["states", "scales", "updates", "results"]

TABLES: frozenset[Table] = frozenset({"states", "scales", "updates", "results"})
NO_TABLES: frozenset[Table] = frozenset()


@dataclass(frozen=True)
class Step:
    """One step of a session, as numpy values.

    Attributes:
        params: the parameters after the step.
        grads: the gradients that were applied, unscaled and clipped, by parameter; None if the step was skipped.
        reported: the result of the step; None if the adapter returns none.
        factor: what the gradients were multiplied by, or None if the adapter does not report it.
    """

    params: Mapping[str, Array]
    grads: Mapping[str, Array] | None
    reported: Reported | None
    factor: float | None = None


class Session(Protocol):
    """A scaler at work on some parameters, with plain SGD: `param -= lr * grad`."""

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        """Takes a step with scaled gradients, as they come from a backward pass; None is a parameter without one."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the scale's state as `to_dict` writes it."""
        ...

    def metrics(self) -> dict[str, Any] | None:
        """Returns the metrics as Python numbers; None if the adapter has none."""
        ...


class Adapter(Protocol):
    """One framework's way to run the table."""

    dtypes: frozenset[str]
    """Names of the gradient types that it takes beside float32."""

    differs: Mapping[Difference, str]
    """Where it does as its peer does, and why."""

    sampled: frozenset[Table]
    """Tables of which it runs only the first case of each kind of policy, as it compiles every case."""

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> Session:
        """Returns a new session."""
        ...

    def default(self) -> Policy:
        """Returns the policy that a user gets who gives none."""
        ...


class Registered(NamedTuple):
    """Where an adapter is found, under which name, and the packages it cannot run without."""

    module: str
    needs: tuple[str, ...]
    name: str = "ADAPTER"


REGISTERED: Mapping[str, Registered] = {
    "numpy": Registered("tests.conformance.numpy_adapter", ("numpy",)),
    "torch": Registered("tests.conformance.torch_adapter", ("torch",)),
    "torch-foreach": Registered("tests.conformance.torch_adapter", ("torch",), "FOREACH"),
    "torch-fused": Registered("tests.conformance.torch_adapter", ("torch",), "FUSED"),
    "torch-gradscaler": Registered("tests.conformance.torch_grad_scaler_adapter", ("torch",)),
    "torch-gradscaler-foreach": Registered("tests.conformance.torch_grad_scaler_adapter", ("torch",), "FOREACH"),
    "torch-gradscaler-fused": Registered("tests.conformance.torch_grad_scaler_adapter", ("torch",), "FUSED"),
    "jax": Registered("tests.conformance.jax_adapter", ("jax", "optax")),
    "jax-jit": Registered("tests.conformance.jax_adapter", ("jax", "optax"), "COMPILED"),
    "jax-value-and-grad": Registered("tests.conformance.jax_value_and_grad_adapter", ("jax", "optax")),
    "jax-value-and-grad-jit": Registered("tests.conformance.jax_value_and_grad_adapter", ("jax", "optax"), "COMPILED"),
    "jax-scaled": Registered("tests.conformance.jax_scaled_adapter", ("jax", "optax")),
    "jax-scaled-jit": Registered("tests.conformance.jax_scaled_adapter", ("jax", "optax"), "COMPILED"),
    "keras-tensorflow": Registered("tests.conformance.keras_children", ("keras", "tensorflow"), "TENSORFLOW"),
    "keras-jax": Registered("tests.conformance.keras_children", ("keras", "jax"), "JAX"),
    "keras-torch": Registered("tests.conformance.keras_children", ("keras", "torch"), "TORCH"),
    "mxnet": Registered("tests.conformance.mxnet_adapter", ("mxnet",)),
}


def chosen(requested: str | None, registered: Mapping[str, Registered] = REGISTERED) -> list[str]:
    """Returns the names of the adapters to run: those requested, or all whose packages are installed."""
    if not requested:
        return [name for name, entry in registered.items() if all(find_spec(need) for need in entry.needs)]
    names = [name.strip() for name in requested.split(",")]
    if unknown := sorted(set(names) - set(registered)):
        raise ValueError(
            f"{VARIABLE} names adapters that are registered. Received: {unknown}. Known: {list(registered)}."
        )
    return names


def load(name: str, registered: Mapping[str, Registered] = REGISTERED) -> Adapter:
    """Returns an adapter. One that cannot be loaded raises, and so fails the run: it was asked for."""
    entry = registered[name]
    return getattr(importlib.import_module(entry.module), entry.name)


def adapters() -> dict[str, Adapter]:
    """Returns the adapters of this run, by name."""
    return {name: load(name) for name in chosen(os.environ.get(VARIABLE))}
