"""What is refused: trainers whose update cannot be checked first, or would be wrong, and losses too narrow to scale."""

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon, nd

from gradscale.mxnet.gradients import is_half
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies


def check_trainer(trainer: Any) -> None:
    """Raises if `trainer` is no Gluon trainer, or has a scaler already."""
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(f"`trainer` must be a `gluon.Trainer`. Received: {trainer!r} ({type(trainer).__name__}).")
    if hasattr(trainer, "_gradscale"):
        raise ValueError(
            "A trainer is initialized once. Received: a trainer that has a scaler already, which "
            "`gradscale.mxnet.scaler_of(trainer)` returns. For another policy make another trainer."
        )
    if hasattr(trainer, "_amp_loss_scaler"):
        raise ValueError(
            "A trainer has one loss scaler. Received: a trainer that has MXNet's own. "
            "Remove the call of `amp.init_trainer`; `amp.init` may stay."
        )


def check_update_place(trainer: Any) -> None:
    """Raises if the key-value store updates the weights: it would do so while it sums the gradients, unchecked."""
    # With two contexts this is MXNet's default, under which its own amp writes an inf into the weights of both.
    params = trainer._kvstore_params
    kind = params["kvstore"] if isinstance(params["kvstore"], str | None) else params["kvstore"].type
    received = remedy = ""
    if params["update_on_kvstore"] or trainer._update_on_kvstore:
        received = "update_on_kvstore=True"
        remedy = "Call `init_trainer` right after the trainer is made, before `step`, `save_states` and `load_states`"
        if params["update_on_kvstore"]:
            remedy = "Leave the argument of `Trainer` out"
    elif kind is not None and "async" in kind:
        received, remedy = f"kvstore={kind!r}", "Use 'dist_sync' instead"
    elif trainer._contains_sparse_weight:
        received, remedy = "sparse weights", "Use dense weights; gradients may be sparse"
    elif trainer._contains_sparse_grad and kind is not None and "dist" in kind:
        received, remedy = f"sparse gradients with kvstore={kind!r}", "Use dense gradients"
    if received:
        raise ValueError(
            "The trainer itself must update the weights, so that an overflow is found before. A key-value store would "
            f"write it into them first. Received: {received}. {remedy}."
        )


def check_compression(trainer: Any) -> None:
    """Raises if gradients are compressed when they are summed: an inf becomes the threshold, and is not found."""
    if trainer._compression_params:
        raise ValueError(
            "Gradients must not be compressed, as that hides an overflow: inf becomes the threshold. "
            f"Received: compression_params={trainer._compression_params!r}. Leave the argument of `Trainer` out."
        )


def check_masters(trainer: Any, policy: Policy) -> None:
    """Raises if float16 weights would be updated in float16, where one over a large scale is zero."""
    if trainer._optimizer.multi_precision or not multiplies(policy):
        return
    half = [param.name for param in trainer._params if param.grad_req != "null" and is_half(param)]
    if half:
        raise ValueError(
            "Parameters in float16 need an optimizer that computes in float32, as 1/scale and many updates are zero in "
            f"float16. Received: multi_precision=False, and parameters in float16: {', '.join(half[:5])}. "
            "Add 'multi_precision': True to `optimizer_params`."
        )


def check_optimizer(trainer: Any, policy: Policy) -> None:
    """Raises if the optimizer uses gradients before it multiplies them by `rescale_grad`, while they are scaled."""
    optimizer = trainer._optimizer
    if not multiplies(policy) or not isinstance(optimizer, mx.optimizer.LBSGD):
        return
    if optimizer.warmup_strategy == "lars" or optimizer.batch_scale != 1:
        raise ValueError(
            "An optimizer must unscale gradients before it uses them. `LBSGD` takes the norm of scaled ones if "
            "warmup_strategy='lars', and sums those of different scales if `batch_scale` is not 1. Received: "
            f"warmup_strategy={optimizer.warmup_strategy!r}, batch_scale={optimizer.batch_scale!r}. Use 'lamb' or "
            "'lars' instead of 'lbsgd', and grad_req='add' to accumulate gradients."
        )


def check_loss(loss: Any, policy: Policy) -> None:
    """Raises if the scale cannot multiply `loss`, or its gradient, exactly."""
    if not isinstance(loss, nd.NDArray):
        raise TypeError(
            f"`loss` must be an MXNet array, or a list or tuple of them. Received: {loss!r} ({type(loss).__name__})."
        )
    kind = np.dtype(loss.dtype)  # MXNet's bfloat16 is a record with one field, named so
    if kind.kind != "f" or (kind.itemsize < 4 and multiplies(policy)):
        raise TypeError(
            "A loss must be float32 or wider, as a scale like 65536 does not fit a narrower type. "
            f"Received: {kind.names[0] if kind.names else kind.name}. "
            "Cast the model's outputs before the loss is computed: `outputs.astype('float32')`."
        )
