"""Exponent histograms of pytrees, inside of compiled functions and outside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradscale.histogram.counts import EXPONENTS, MX_BLOCK, ExponentHistogram, check_block
from gradscale.jax.tree import is_inexact, register
from gradscale.kernels.jax_exponents import block_counts, exponent_counts

register(ExponentHistogram)


def exponent_histogram(tree: Any) -> ExponentHistogram:
    """Returns the exponent histogram of all floating-point arrays of a pytree together; other leaves are left out.

    A pytree itself, with arrays in its fields: compute it inside of a compiled step, and return it. Counts are uint32,
    which holds four billion elements. Functions of `gradscale.histogram` take it outside, and then synchronize. The
    counts are those of `gradscale.histogram.exponent_histogram`, exactly.

    >>> import jax
    >>> histogram = jax.jit(exponent_histogram)({"w": jnp.array([1.0, 1.5, -4.0, 0.0]), "b": jnp.array(jnp.inf)})
    >>> histogram.highest, histogram.nonzero, int(histogram.zeros), int(histogram.infs)
    (2, 3, 1, 1)
    """
    return _sum_of(tree, exponent_counts)


def block_histogram(tree: Any, block: int = MX_BLOCK) -> ExponentHistogram:
    """Returns the histogram of the largest magnitude of each block of `block` elements along the last dimension.

    `gradscale.histogram.block_histogram` describes its use, and `exponent_histogram` the result. An array whose last
    dimension is not a multiple of `block` is padded, which makes a copy of it.

    >>> histogram = block_histogram(jnp.array([[1.0, 8.0, 0.0, 0.0], [0.5, -0.25, 3.0, 0.0]]), block=2)
    >>> histogram.highest, histogram.lowest, histogram.nonzero, int(histogram.zeros)
    (3, -1, 3, 1)

    Raises:
        ValueError: `block` is not positive.
    """
    check_block(block)
    return _sum_of(tree, lambda array: block_counts(array, block))


def _sum_of(tree: Any, count: Callable[[Array], Array]) -> ExponentHistogram:
    total = jnp.zeros(EXPONENTS.size + 3, "uint32")
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and is_inexact(leaf):
            total = total + count(jnp.asarray(leaf))
    return ExponentHistogram(total[: EXPONENTS.size], *total[EXPONENTS.size :])
