"""`scaled`: loss scaling as an optax transformation, around the optimizer."""

from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from gradscale.engine.decide import check_clip
from gradscale.engine.hints import explains_arguments
from gradscale.jax.agree import zeros
from gradscale.jax.apply import check_accumulation, gated
from gradscale.jax.axes import AxisNames
from gradscale.jax.optimizer import in_types_of, trainable, update
from gradscale.jax.scaler import Scaler, static_policy
from gradscale.jax.tree import Gradients, Leaf, holds, split
from gradscale.policies.contract import Policy


class ScaledState(NamedTuple):
    """State of `scaled`.

    Attributes:
        scaler: the scale and its counters.
        inner: state of the transformation inside.
    """

    scaler: Scaler
    inner: Any


@explains_arguments("scaled(tx, policy={})")
def scaled(
    tx: optax.GradientTransformation,
    policy: Policy | str = "auto",
    clip_norm: float | None = None,
    *,
    axis_names: AxisNames = None,
    specs: Any = None,
    wide_state: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that takes scaled gradients: it unscales, checks and clips them for `tx`, or skips.

    Multiply the loss by `loss_scale(opt_state)`. A skipped step gives updates of zero and leaves the state of `tx` as
    it was, so no schedule advances. `update` takes the unscaled loss as `loss=`: a loss that is not finite then does
    not count as an overflow. All other arguments go to `tx`: a `value`, `grad` and `value_fn` that it asks for must be
    those of the unscaled loss.

    Types are those that optax alone gives: the state is that of `tx.init(params)`, and updates have the type of
    gradients and parameters. In between, `tx` computes in float32 or wider. Leaves in flax's collection
    `_overwrite_with_gradient` are not trained: their update is their next value, as it left the backward pass, or the
    present one in a skipped step if `params` are given.

    It must be the outermost: what comes before sees scaled gradients, what comes after runs on a skip too. Chains,
    `MultiSteps`, `masked`, `inject_hyperparams` and schedules go inside. `loss_scale` refuses a state in which it is
    not the outermost. `apply` is faster where you can use it: it also adds the updates behind the gate.

    >>> tx = scaled(optax.sgd(0.5))
    >>> params = {"w": jax.numpy.float32(3.0)}
    >>> opt_state = tx.init(params)
    >>> grads = jax.grad(lambda p: p["w"] ** 2 * loss_scale(opt_state))(params)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> float(updates["w"])
    -3.0

    Args:
        tx: the optimizer.
        policy: the rule for the scale, or its name, as for `Scaler`.
        clip_norm: bound on the norm of all gradients together, unscaled.
        axis_names: mapped axes to agree over. By default all axes of `shard_map` and `pmap`.
        specs: the `PartitionSpec` of the gradients, or a pytree of them, as in `in_specs`. Needed for the norm and
            for `Histogram` under `pmap` and with `check_vma=False`.
        wide_state: keep the state of `tx` in float32 where parameters are narrower. In FP16, moments lose the small
            gradients that the scale preserved, and a squared gradient below 6e-8 becomes zero.
    """
    rule = static_policy(policy)
    check_clip("clip_norm", clip_norm)

    def start(params: Any) -> Any:
        state = ScaledState(Scaler(rule), tx.init(trainable(params, wide=wide_state)))
        if holds(ScaledState, state.inner):
            raise ValueError("`scaled` must not be inside another `scaled`: gradients would be divided twice. Use one.")
        check_accumulation(state.inner, clip_norm)
        return state

    def step(updates: Any, state: Any, params: Any = None, *, loss: Any = None, **extra: Any) -> tuple[Any, Any]:
        loss_scale(state)  # raises if this is not a state of `scaled`
        grads, scaler, result = state.scaler.step(
            updates, loss, clip_norm=clip_norm, axis_names=axis_names, specs=specs
        )

        def change() -> tuple[Any, Any]:
            changes, inner = update(tx, grads, state.inner, params, extra)
            return in_types_of(changes, updates, params), inner

        def keep() -> tuple[Any, Any]:
            # Zeros of the type of the updates, which need not be that of the gradients. Traced, not run.
            kinds, _ = jax.eval_shape(change)
            still = split(jax.tree.map(zeros, kinds), "updates")
            present = split(updates if params is None else params, "params").of(Leaf.OVERWRITTEN)
            return still.filled(Gradients(still.of(Leaf.TRAINED), present)), state.inner

        changes, inner = gated(result, change, keep) if result.attempted else keep()
        return changes, ScaledState(scaler, inner)

    return optax.GradientTransformationExtraArgs(start, step)


def loss_scale(opt_state: Any) -> Array:
    """Returns the scale to multiply the loss by, from a state of `scaled`. Does not synchronize.

    Raises:
        ValueError: the state is not one of `scaled`, or `scaled` is inside another transformation.
    """
    # By class: `optax.tree_get` returns None here, and would also find a `scaled` that is not the outermost.
    if isinstance(opt_state, ScaledState):
        return opt_state.scaler.loss_scale
    if holds(ScaledState, opt_state):
        raise ValueError(
            "`scaled` must be the outermost transformation: outside of it, gradients are still scaled and a skipped "
            f"step is not known. Received: it is inside a {type(opt_state).__name__}. "
            "Write `scaled(optax.chain(...))`, `scaled(optax.MultiSteps(...))` and so on, and give the state of that."
        )
    raise ValueError(
        f"`loss_scale` takes the state of `scaled(tx).init(params)`. Received: {type(opt_state).__name__}. "
        "With `value_and_grad` the scale is `scaler.loss_scale`."
    )
