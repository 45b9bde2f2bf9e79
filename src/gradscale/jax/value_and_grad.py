"""`value_and_grad`: scales, differentiates, checks, unscales and clips, and updates the scale."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradscale.engine.bf16 import note_bf16
from gradscale.engine.decide import check_clip, check_retries
from gradscale.engine.hints import explains_arguments
from gradscale.jax.axes import AxisNames
from gradscale.jax.forward import checked_argnums, forward
from gradscale.jax.remember import StepResult
from gradscale.jax.retry import attempts
from gradscale.jax.scaler import Scaler
from gradscale.jax.step import Step
from gradscale.jax.tree import Leaf
from gradscale.policies.contract import Policy

Gradient = Callable[..., tuple[Any, Any, Scaler, StepResult]]
"""Takes a scaler and the function's own arguments; returns value, gradients, the next scaler and the result."""


@explains_arguments("value_and_grad")
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    clip_norm: float | None = None,
    norm: bool = False,
    retries: int = 0,
    axis_names: AxisNames = None,
    mean_axes: str | tuple[str, ...] = (),
    specs: Any = None,
) -> Gradient:
    """Returns a function like `jax.value_and_grad(fun)` that takes a scaler first, and returns four things.

    `(scaler, *args, **kwargs) -> value, grads, scaler, result`. The value is the unscaled loss, or (loss, aux). The
    gradients are unscaled too, in float32 or wider, and clipped. If one was inf or NaN, or the loss was, they are all
    zeros, and `result.applied` is False; `apply` then changes nothing. The scaler is the one for the next step.

    Leaves in flax's collection `_overwrite_with_gradient` are not measured, unscaled or clipped: what is returned for
    them is their next value, as it left the backward pass, and their present one if the step is skipped. Integer leaves
    get zeros, and leaves that are no arrays None.

    Gradients are read once for each size that is needed, largest magnitude or norm; either shows whether they are
    finite. The function can be differentiated again unless it retries. Does not synchronize with the device.

    >>> import jax
    >>> loss = lambda w, x: jax.numpy.sum(w * x)
    >>> value, grads, scaler, result = value_and_grad(loss)(Scaler(), jnp.ones(2), jnp.array([3.0, 4.0]))
    >>> float(value), grads.tolist(), bool(result.applied)
    (7.0, [3.0, 4.0], True)

    Args:
        fun: returns a loss in float32 or wider, without dimensions.
        argnums: which of `args` to differentiate by: one, or several.
        has_aux: whether `fun` returns (loss, aux).
        clip_norm: bound on the norm of all gradients together, unscaled.
        norm: measure the norm for the result even if nothing is clipped.
        retries: how often to run the backward pass again, at a lower scale each time, when it overflows. The forward
            pass is run once, and its residuals stay in memory until the last attempt.
        axis_names: mapped axes to agree over: what one device finds counts for all of them. By default all axes of
            `shard_map` and `pmap`, and `mean_axes`.
        mean_axes: mapped axes to average the gradients over before they are measured, under `pmap` and with
            `check_vma=False`. They are then those of the mean of all devices' losses.
        specs: the `PartitionSpec` of what is differentiated, or a pytree of them, as in `in_specs`. Needed only under
            `pmap` and with `check_vma=False`, where parameters are sharded over mapped axes.

    Raises:
        TypeError: `argnums` or `retries` is not an integer, or `clip_norm` not a number.
        ValueError: `retries` is negative, or `clip_norm` not positive.

    The function that is returned raises ValueError where an axis is not mapped, the scale differs between devices that
    share it, or the norm of sharded parameters is asked for without `specs`, or their share above the edge of a
    `Histogram`, as far as JAX's types show it.
    """
    if isinstance(fun, Scaler):
        raise TypeError(
            "`value_and_grad` takes the function of the loss, and what it returns takes the scaler. Received: a Scaler "
            "first. Call it as `value_and_grad(fun)(scaler, params, ...)`."
        )
    check_clip("clip_norm", clip_norm)
    check_retries(retries)
    positions = checked_argnums(argnums)

    def value_and_gradients(scaler: Scaler, *args: Any, **kwargs: Any) -> tuple[Any, Any, Scaler, StepResult]:
        if not isinstance(scaler, Scaler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "The first argument must be a `Scaler`; those of `fun` come after it. "
                f"Received: {type(scaler).__name__}. Make one with `Scaler(policy)`."
            )
        run = forward(fun, positions, has_aux, scaler.policy, args, kwargs)
        step = Step.of(scaler.policy, clip_norm, norm, run.params, axis_names, mean_axes, specs)
        step.axes.check_scale(scaler.loss_scale, [run.loss, *run.params.of(Leaf.TRAINED)])
        _note_if_bf16(run.pullback, scaler.policy)
        pull, loss_finite = functools.partial(run.gradients, axes=step.axes), jnp.isfinite(run.loss)
        if retries and step.plan.checks and run.params.of(Leaf.TRAINED):
            last, retried = attempts(step, scaler.state, pull, loss_finite, retries)
        else:
            last, retried = step.attempt(scaler.state, pull(scaler.loss_scale), loss_finite), 0
        gradients, state, result = step.finish(scaler.state, last, run.params.names, retried)
        if gradients.overwrites and result.gated:
            # A backward pass that overflowed may have put an inf into an amax history.
            present = run.params.of(Leaf.OVERWRITTEN)
            gradients = gradients._replace(overwrites=result.select(gradients.overwrites, present))
        value = (run.loss, run.aux) if has_aux else run.loss
        return value, run.params.gradients(gradients), scaler.with_state(state), result

    return value_and_gradients


def _note_if_bf16(pullback: Any, policy: Policy) -> None:
    """Logs that scaling is not needed if what a forward pass kept for its backward pass is BF16 and nowhere narrower.

    Reads types alone, which are known while a function is traced.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(pullback) if isinstance(leaf, Array)}
    if {each for each in dtypes if jnp.issubdtype(each, jnp.floating) and each.itemsize < 4} == {jnp.dtype("bfloat16")}:
        note_bf16(
            policy,
            "`value_and_grad` scales a loss that was computed in BF16.",
            "Switch scaling off: `Scaler(NoScaling())`.",
        )
