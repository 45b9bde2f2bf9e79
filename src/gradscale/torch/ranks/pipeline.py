"""Pipelines of `torch.distributed.pipelining`: a loss on the last stage alone, and backward passes on all of them."""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from gradscale.torch.gradients import parameters_of
from gradscale.torch.host import to_device
from gradscale.torch.window.autograd import fills, leaf_nodes
from gradscale.torch.window.window import Window, Windows

Optimizer = torch.optim.Optimizer


class Pipeline:
    """Scales the gradients that leave the last stage, and opens the windows of the others, which never see a loss.

    A schedule differentiates what the loss function returns, and also reports it to the user. So its value stays as it
    is, and its gradient is multiplied by the scale. The stages before get scaled gradients from there, and as all ranks
    have the same scale, each knows what to divide by.
    """

    def __init__(self, windows: Windows, modules: Sequence[nn.Module]) -> None:
        self.in_loss_fn = False  # whether the loss function is called now
        self._windows = windows
        self._has_loss = False
        for module in modules:
            module.register_forward_hook(_Outputs(self))

    def refuse_scale(self) -> None:
        """Raises if the loss function that is called now scales the loss itself."""
        if self.in_loss_fn:
            raise RuntimeError(
                "`wrap_loss` scales the gradients of the loss that the loss function returns. Received: `scale` or "
                "`backward`, called in the loss function, so that they would be scaled twice. Return the loss itself."
            )

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss as it is, with a hook that multiplies its gradient by the scale."""
        if not loss.requires_grad:  # in `schedule.eval`
            return loss
        self._has_loss = True
        # A tensor of its own, whose hook the user's other graphs do not see; wide, as FP16 cannot hold every scale.
        own = loss.float() if loss.dtype.itemsize < 4 else loss.clone()
        self._windows.get(loss.device)
        own.register_hook(partial(self._on_loss, loss.detach(), _leaf_below(own)))
        return own

    def _on_loss(self, loss: Tensor, leaf: Any, grad: Tensor) -> Tensor:
        window = self._begin(leaf, grad.device)
        if window is not None:
            window.note_loss(loss)
        scale = (window or self._windows.get(grad.device)).scale
        return grad * to_device(scale, grad.device, grad.dtype)

    def on_output(self, leaf: Any, grad: Tensor) -> None:
        """Opens the window of a stage without a loss when the backward pass of an output begins."""
        # With a loss, only its own backward pass opens one: gradients of any other would not be scaled.
        if not self._has_loss:
            self._begin(leaf, grad.device)

    def _begin(self, leaf: Any, device: torch.device) -> Window | None:
        """Returns the window of a backward pass that begins; None if it fills no gradients.

        Such is the one with which a schedule finds out, before its first step, the shapes of what stages send: of a
        loss on uninitialized memory, which says nothing about the step.
        """
        if leaf is not None and not fills(leaf):
            return None
        return self._windows.begin(device)

    def ready(self, optimizers: Sequence[Optimizer]) -> None:
        """Opens a window for gradients of backward passes that were not seen, or raises if there were none.

        They are not seen where the scaler has no model, or a schedule splits them in two. A stage that is frozen has
        none, and takes part in the step without gradients.
        """
        window = self._windows.open
        if window is not None and window.passes:
            return
        parameters = parameters_of(optimizers)
        trained = any(each.requires_grad or each.grad is not None for each in parameters)
        scaled = window is not None or not self._has_loss
        if trained and not (scaled and self._windows.any_written(parameters)):
            raise RuntimeError(
                "`step` needs gradients, and no backward pass of a scaled loss was run on this stage since the last "
                "step. Call `schedule.step(...)`, of a schedule whose loss function is `scaler.wrap_loss(loss_fn)`, on "
                "every rank before every `scaler.step(...)`."
            )
        self._windows.begin(parameters[0].device)


def wrapped(loss_fn: Callable[..., Any], scaled: Callable[[Tensor], Tensor], pipeline: Pipeline) -> Callable[..., Any]:
    """Returns `loss_fn` with `scaled` called on every loss that it returns. Raises if it is wrapped already."""
    if getattr(loss_fn, "_gradscale_wrapped", False):
        raise ValueError(
            "`wrap_loss` takes a loss function as it is. Received: one that `wrap_loss` has returned, whose gradients "
            "would be scaled twice. Wrap it once."
        )
    # Not compiled: hooks are Python, and belong to the tensor that the schedule gets.
    mapped = _disable_dynamo(partial(tree_map, scaled))

    def call(*args: Any, **kwargs: Any) -> Any:
        pipeline.in_loss_fn = True
        try:
            loss = loss_fn(*args, **kwargs)
        finally:
            pipeline.in_loss_fn = False
        return mapped(loss)

    # The name and the signature; a module, as `nn.MSELoss()` is, has no name to copy, and its attributes are its own.
    update_wrapper(call, loss_fn, updated=())
    call._gradscale_wrapped = True  # type: ignore[attr-defined]
    return call


class _Outputs:
    """The hook of a pipeline on the outputs of a module. That of a copied module does nothing."""

    def __init__(self, pipeline: Pipeline | None = None) -> None:
        self._pipeline = pipeline

    def __reduce__(self) -> tuple[type["_Outputs"], tuple[()]]:
        return _Outputs, ()

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if self._pipeline is not None and torch.is_grad_enabled():
            for each in tree_leaves(output):
                # Without a graph it is an input passed on, which a backward pass adds to without any parameter.
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    each.register_hook(partial(self._pipeline.on_output, _leaf_below(each)))


def _leaf_below(output: Tensor) -> Any:
    """Returns the node that adds to the gradient of some leaf in the graph of `output`; None if there is none."""
    return next(leaf_nodes(output.grad_fn), None)
