"""Trainers of parameters with three elements, and losses whose gradients the tests choose."""

from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp

from gradscale.mxnet import scale_loss

ONE = (mx.cpu(0),)
TWO = (mx.cpu(0), mx.cpu(1))


class Chosen(autograd.Function):
    """A loss whose gradient is `slope`, in the type of the parameter, whatever the parameter is.

    Args:
        slope: the gradient.
        value: the loss.
    """

    def __init__(self, slope: Any, value: float = 1.0) -> None:
        super().__init__()
        self._slope, self._value = slope, value

    def forward(self, weight: Any) -> Any:
        self._dtype = weight.dtype
        return nd.array([self._value], ctx=weight.context)

    def backward(self, head: Any) -> Any:
        return (head * self._slope).astype(self._dtype)


def make_parameter(contexts: Sequence[Any] = ONE, dtype: str = "float32", name: str = "weight", **options: Any) -> Any:
    """Returns a parameter of ones."""
    param = gluon.Parameter(name, shape=(3,), dtype=dtype, **options)
    param.initialize(mx.init.One(), ctx=list(contexts))
    return param


def make_trainer(*params: Any, **options: Any) -> Any:
    """Returns a trainer of the parameters by plain SGD, with a learning rate of 1 and masters in float32."""
    return gluon.Trainer(list(params), "sgd", {"learning_rate": 1.0, "multi_precision": True}, **options)


def use_mxnets_amp(trainer: Any) -> None:
    """Does what `amp.init_trainer` does. That wants `amp.init` first, which changes the operators of the process."""
    trainer._amp_loss_scaler, trainer._amp_original_scale = amp.loss_scaler.LossScaler(), trainer._scale


def losses(trainer: Any, *slopes: Any, value: float = 1.0) -> list[Any]:
    """Returns a loss for each context, of all parameters, with the gradients that are given. Must be recorded."""
    found = []
    for context, slope in zip(trainer._contexts, slopes, strict=True):
        chosen = nd.array(slope, ctx=context)
        found.append(nd.add_n(*(Chosen(chosen, value)(param.data(context)) for param in trainer._params)))
    return found


def backward(trainer: Any, *slopes: Any, value: float = 1.0) -> None:
    """Makes gradients of scaled losses: on each context those that are given, unscaled."""
    with autograd.record(), scale_loss(losses(trainer, *slopes, value=value), trainer) as scaled:
        autograd.backward(scaled)


def weights(trainer: Any) -> list[list[float]]:
    """Returns the first parameter's elements on each context."""
    return [data.asnumpy().tolist() for data in trainer._params[0].list_data()]
