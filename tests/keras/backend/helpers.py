"""A small model whose gradients overflow on demand, and steps that are compiled as each backend compiles them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

BACKEND = keras.config.backend()

INF, NAN = float("inf"), float("nan")

Arrays = Sequence[Any]


def network(*, seed: int = 0, dtype: str | None = None) -> Any:
    """Returns a model with one hidden layer, built."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(3, activation="tanh", dtype=dtype, name="hidden"),
            layers.Dense(1, dtype="float32", name="out"),
        ]
    )
    return model


LARGE = 1e17
"""A target whose loss, 1e34, is finite, and whose gradients are not at a scale of 2**80."""


def data(*bad: int, batches: int = 4, size: int = 4, target: float = 3e38) -> tuple[Any, Any]:
    """Returns inputs and targets. Those of the batches `bad` are so large that the loss is inf, unless given."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(batches * size, 4)), rng.normal(size=(batches * size, 1))
    for number in bad:
        targets[number * size : (number + 1) * size] = target
    return inputs.astype("float32"), targets.astype("float32")


def without(bad: int, inputs: Any, targets: Any, size: int = 4) -> tuple[Any, Any]:
    """Returns the data without one batch."""
    kept = np.arange(len(inputs)) // size != bad
    return inputs[kept], targets[kept]


def trained(optimizer: Any, batches: tuple[Any, Any], model: Any = None, **options: Any) -> Any:
    """Returns a model trained once on all batches, in order: by default uncompiled, which is quicker for so few."""
    model = network() if model is None else model
    model.compile(optimizer, loss="mse", **options or {"run_eagerly": True})
    model.fit(*batches, batch_size=4, shuffle=False, verbose=0)
    return model


def host(variable: Any) -> Any:
    """Returns the value of a variable as a numpy array."""
    return keras.ops.convert_to_numpy(keras.ops.copy(variable.value))


def weights(model: Any) -> list[Any]:
    return [host(variable) for variable in model.weights]


def inner_state(optimizer: Any) -> list[Any]:
    return [host(variable) for variable in optimizer.inner_optimizer.variables]


def same(left: Arrays, right: Arrays) -> bool:
    """Returns whether two lists of arrays have the same shapes, types and bits."""
    pairs = zip(left, right, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def variables(*values: Any) -> list[Any]:
    return [keras.Variable(np.asarray(value, "float32"), name=f"w{place}") for place, value in enumerate(values)]


def tensors(*values: Any, dtype: str = "float32") -> list[Any]:
    return [None if value is None else keras.ops.convert_to_tensor(np.asarray(value, dtype)) for value in values]


def numbers(*values: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(value)).tolist() for value in values]


def compiled(optimizer: Any, models: Arrays, **options: Any) -> Callable[..., Any]:
    """Returns `optimizer.apply_if_finite` for gradients of `models`, compiled where the backend compiles."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda *grads: optimizer.apply_if_finite(grads, models, **options), jit_compile=True)
    if BACKEND == "jax":
        return _jitted(optimizer, models, options)
    return lambda *grads: optimizer.apply_if_finite(grads, models, **options)


def _jitted(optimizer: Any, models: Arrays, options: dict[str, Any]) -> Callable[..., Any]:
    import jax

    step = jax.jit(lambda mine, grads, theirs: optimizer.stateless_apply_if_finite(mine, grads, theirs, **options))

    def run(*grads: Any) -> Any:
        mine = [variable.value for variable in optimizer.variables]
        theirs, mine, result = step(mine, list(grads), [variable.value for variable in models])
        for variable, value in zip([*models, *optimizer.variables], [*theirs, *mine], strict=True):
            variable.assign(value)
        return result

    return run
