"""The adapters that the conformance table runs on: what each must offer, and which are asked for.

To join, write a module with an `ADAPTER` beside this one and register it in `REGISTERED`.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradscale import Policy, Status

Array = np.ndarray[Any, Any]

VARIABLE = "GRADSCALE_ADAPTERS"
"""Environment variable with the adapters to run, as in `numpy,torch`. Without it, all whose framework is installed."""


@dataclass(frozen=True)
class Step:
    """What became of one step of a session, as numpy values.

    Attributes:
        status: what became of it.
        params: the parameters after the step.
        grads: the gradients that were applied, unscaled and clipped, by parameter; None if the step was skipped.
        grad_norm: the true norm, or None.
        factor: what the gradients were multiplied by, or None if the adapter does not tell.
    """

    status: Status
    params: Mapping[str, Array]
    grads: Mapping[str, Array] | None
    grad_norm: float | None
    factor: float | None = None


class Session(Protocol):
    """A scaler at work on some parameters, with plain SGD: `param -= lr * grad`."""

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        """Takes a step with scaled gradients, as they come from a backward pass; None is a parameter without one."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the scale's state as `to_dict` writes it."""
        ...


class Adapter(Protocol):
    """One framework's way to run the table."""

    dtypes: frozenset[str]
    """Names of the gradient types that it takes beside float32."""

    def open(self, policy: Policy, params: Mapping[str, Array], lr: float) -> Session:
        """Returns a new session."""
        ...


class Registered(NamedTuple):
    """Where an adapter is found, and the packages it cannot run without."""

    module: str
    needs: tuple[str, ...]


REGISTERED: Mapping[str, Registered] = {
    "numpy": Registered("tests.conformance.numpy_adapter", ("numpy",)),
    "torch": Registered("tests.conformance.torch_adapter", ("torch",)),
    "jax": Registered("tests.conformance.jax_adapter", ("jax", "optax")),
    "jax-jit": Registered("tests.conformance.jax_jit_adapter", ("jax", "optax")),
    "keras-tensorflow": Registered("tests.conformance.keras_tensorflow_adapter", ("keras", "tensorflow")),
    "keras-jax": Registered("tests.conformance.keras_jax_adapter", ("keras", "jax")),
    "keras-torch": Registered("tests.conformance.keras_torch_adapter", ("keras", "torch")),
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
    return importlib.import_module(registered[name].module).ADAPTER


def adapters() -> dict[str, Adapter]:
    """Returns the adapters of this run, by name."""
    return {name: load(name) for name in chosen(os.environ.get(VARIABLE))}
