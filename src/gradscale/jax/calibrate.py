"""`calibrate`: the best static scale for the gradients of parameters, measured in float32."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.formats import FP16, Format, get_format
from gradscale.histogram.calibration import Calibration, add_batch, calibration_of
from gradscale.histogram.counts import ExponentHistogram
from gradscale.jax.histogram import exponent_histogram
from gradscale.jax.tree import path_name


def calibrate(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    format: Format | str = FP16,
    *,
    margin_bits: float = 2,
) -> Calibration:
    """Returns the best static scale for the gradients of `params`, and the leaves that no single scale serves.

    Gradients of activations are not seen, and may be larger: leave a wider margin than with PyTorch's `calibrate`,
    or add a probe to an activation, whose gradient is that of the activation.

    Args:
        loss_fn: takes parameters and a batch, and returns the loss. Compiled once.
        params: a pytree of float32 parameters.
        batches: some dozens.
        format: the format that gradients are to be computed in.
        margin_bits: how many times the gradients may double before they overflow.

    >>> import jax.numpy as jnp
    >>> calibrate(lambda w, x: jnp.sum(w * x), jnp.ones(2), [jnp.array([0.5, 1e-3])]).scale
    8192.0

    Raises:
        ValueError: there are no batches, a parameter is narrower than float32, gradients are all zero, or one is inf
            or NaN.
    """
    limits = get_format(format)
    named = [(path_name(path) or "params", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    for name, leaf in named:
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
            raise ValueError(
                "`calibrate` measures in float32, where no gradient is lost. "
                f"Received: {name} of {dtype}. Pass float32 parameters."
            )

    @jax.jit
    def count(params: Any, batch: Any) -> list[ExponentHistogram]:
        return [exponent_histogram(leaf) for leaf in jax.tree.leaves(jax.grad(loss_fn)(params, batch))]

    found: dict[str, ExponentHistogram] = {}
    for index, batch in enumerate(batches):
        # In int64: uint32 would overflow over many batches.
        measured = jax.tree.map(lambda number: np.asarray(number, np.int64), count(params, batch))
        add_batch(found, dict(zip((name for name, _ in named), measured, strict=True)), index)
    if not found:
        raise ValueError("`calibrate` needs batches and parameters. Received: none.")
    return calibration_of(found, limits, margin_bits)
