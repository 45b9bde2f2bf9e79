"""What a program trains: parameters of every kind, the model that holds them, optimizers and policies, all by value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, Histogram, LogMax, NoScaling, Static, preset
from gradscale.policies.contract import Policy
from gradscale.torch import MasterWeights
from gradscale.torch.masters import Storage

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}

HALF = ("float16", "bfloat16")

WIDTH = 3
"""Elements in a row of a sparse parameter."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model.

    Its gradients are whole numbers from -4 to 4 times `2**exponent`: sums of a few of them, and products with powers of
    two, are exact in every dtype.

    Attributes:
        name: its name in the model.
        dtype: its type, a key of `DTYPES`.
        size: its elements; of a sparse one, its rows. 0 makes it empty.
        exponent: of its gradients.
        sparse: whether its gradients are sparse, as those of an embedding.
        through_half: whether the forward pass casts it to FP16, as autocast does, so that its gradients overflow there.
        trained: whether it requires gradients.
    """

    name: str
    dtype: str = "float32"
    size: int = 3
    exponent: int = 0
    sparse: bool = False
    through_half: bool = False
    trained: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (self.size, WIDTH) if self.sparse else (self.size,)

    @property
    def is_half(self) -> bool:
        """Whether it has 16 bits, and so a master of its own in `MasterWeights`."""
        return self.dtype in HALF

    @property
    def is_complex(self) -> bool:
        """Whether its type is complex."""
        return self.dtype.startswith("complex")


@dataclass(frozen=True)
class OptimizerSetup:
    """An optimizer.

    Attributes:
        kind: a key of `OPTIMIZERS`.
        groups: the names of the parameters of each group.
        storage: how `MasterWeights` stores the low bits of 16-bit weights; None without `MasterWeights`.
        grad_fp32: the argument of `MasterWeights`.
    """

    kind: str
    groups: tuple[tuple[str, ...], ...]
    storage: Storage | None = None
    grad_fp32: bool = False


@dataclass(frozen=True)
class Setup:
    """Everything that is built before the first operation.

    Attributes:
        parameters: those of the model, in its order.
        optimizers: in the order in which operations count them.
        policy: a key of `POLICIES`.
        tied: a parameter that the model holds under a second name; None for none.
        has_model: whether the scaler is given the model.
        on_device: whether the scaler takes the CPU for a device, whose numbers the host may not look at.
        protects_buffers: whether `protect_buffers` is called.
        loss_dtype: the type of every loss.
    """

    parameters: tuple[Parameter, ...]
    optimizers: tuple[OptimizerSetup, ...]
    policy: str = "dynamic"
    tied: str | None = None
    has_model: bool = True
    on_device: bool = False
    protects_buffers: bool = False
    loss_dtype: Literal["bfloat16", "float32", "float64"] = "float32"

    def parameter(self, name: str) -> Parameter:
        """Returns the parameter of that name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)


def initial(parameter: Parameter) -> Tensor:
    """Returns the first value of a parameter: small whole numbers, which every dtype holds."""
    values = torch.arange(parameter.size * (WIDTH if parameter.sparse else 1), dtype=torch.float64) % 5 - 2
    if parameter.is_complex:
        values = torch.complex(values, 1 - values)
    return values.reshape(parameter.shape).to(DTYPES[parameter.dtype])


_sgd, _adam, _adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Decay(torch.optim.Optimizer):
    """An optimizer of a user's own: SGD whose rate is halved at every step of a group. It takes no closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * 0.5 ** group["steps"])


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(_sgd, lr=0.125, foreach=False),
    "sgd foreach": partial(_sgd, lr=0.125, foreach=True),
    "sgd fused": partial(_sgd, lr=0.125, fused=True),
    "sgd momentum": partial(_sgd, lr=0.125, momentum=0.5, foreach=False),
    "sgd momentum foreach": partial(_sgd, lr=0.125, momentum=0.5, nesterov=True, foreach=True),
    "sgd momentum fused": partial(_sgd, lr=0.125, momentum=0.5, weight_decay=0.25, fused=True),
    "sgd dampening": partial(_sgd, lr=0.125, momentum=0.5, dampening=0.25, weight_decay=0.5, foreach=False),
    "sgd dampening fused": partial(_sgd, lr=0.125, momentum=0.5, dampening=0.25, fused=True),
    "sgd maximize fused": partial(_sgd, lr=0.125, momentum=0.5, nesterov=True, maximize=True, fused=True),
    "adam": partial(_adam, lr=0.01, foreach=False),
    "adam foreach": partial(_adam, lr=0.01, amsgrad=True, foreach=True),
    "adam fused": partial(_adam, lr=0.01, amsgrad=True, fused=True),
    "adamw": partial(_adamw, lr=0.01, foreach=False),
    "adamw foreach": partial(_adamw, lr=0.01, foreach=True),
    "adamw fused": partial(_adamw, lr=0.01, maximize=True, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=False),
    "adagrad foreach": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.5, foreach=True),
    "adagrad fused": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, foreach=False),
    "rmsprop foreach": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "sparse adam": partial(torch.optim.SparseAdam, lr=0.01),
    "user's own": partial(Decay, lr=0.125),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.125, max_iter=2),
}
"""Optimizers by name: torch's own in each implementation, and one that is not torch's."""

FOR_SPARSE = ("sgd", "sgd momentum", "adagrad", "sparse adam", "user's own")
FOR_COMPLEX = ("sgd", "sgd foreach", "sgd momentum", "adam", "adam foreach", "adamw foreach", "rmsprop", "user's own")
FOR_HALF = ("sgd", "sgd foreach", "sgd fused", "sgd momentum", "sgd momentum foreach", "sgd dampening", "user's own")
"""Optimizers for 16-bit parameters without masters. Adam's `eps` is 0 in FP16."""


def make_optimizer(setup: OptimizerSetup, find: Callable[[str], Tensor]) -> torch.optim.Optimizer:
    """Returns the optimizer of torch, with the tensors that `find` returns for its parameters."""
    first, *others = [[find(name) for name in group] for group in setup.groups]
    optimizer = OPTIMIZERS[setup.kind](first)
    for group in others:
        optimizer.add_param_group({"params": group})
    return optimizer


def with_masters(optimizer: torch.optim.Optimizer, setup: OptimizerSetup) -> torch.optim.Optimizer:
    """Returns the optimizer, inside `MasterWeights` if the setup says so."""
    if setup.storage is None:
        return optimizer
    seed = 7 if setup.storage == "stochastic" else None
    return MasterWeights(optimizer, setup.storage, grad_fp32=setup.grad_fp32, seed=seed)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "no scaling": NoScaling,
    "static 1": partial(Static, 1.0),
    "static 1024": partial(Static, 1024.0),
    "static 1/16": partial(Static, 2.0**-4),
    "static 1000": partial(Static, 1000.0),
    "dynamic": partial(Dynamic, init_scale=2.0**10, growth_interval=2, min_scale=2.0**-4),
    "dynamic 65536": partial(Dynamic, growth_interval=3),
    "dynamic low": partial(Dynamic, init_scale=1.0, growth_interval=4, min_scale=2.0**-4),
    "dynamic hysteresis": partial(Dynamic, init_scale=2.0**15, growth_interval=2, hysteresis=2, backoff_factor=0.25),
    "dynamic refill": partial(Dynamic, init_scale=2.0**15, hysteresis=2, refill="clean", max_scale=2.0**16),
    "auto": Headroom,
    "headroom": partial(Headroom, init_scale=2.0**8, min_scale=2.0**-4, margin_bits=1.0, climb_bits=0.0),
    "log max": partial(LogMax, min_scale=2.0**-4),
    "histogram": partial(Histogram, init_scale=2.0**12, period=2, min_scale=2.0**-4),
    "torch": partial(preset, "torch", growth_interval=2),
    "apex": partial(preset, "apex"),
    "deepspeed": partial(preset, "deepspeed"),
    "megatron": partial(preset, "megatron", initial_scale=2.0**15, growth_interval=2),
    "fairseq": partial(preset, "fairseq"),
    "keras": partial(preset, "keras"),
    "tf-keras": partial(preset, "tf-keras"),
    "jmp": partial(preset, "jmp", loss_scale=2.0**15),
    "flax": partial(preset, "flax"),
    "mxnet": partial(preset, "mxnet"),
    "paddle": partial(preset, "paddle"),
    "mindspore": partial(preset, "mindspore", "DynamicLossScaleManager", init_loss_scale=2.0**15),
    "openseq2seq": partial(preset, "openseq2seq"),
    "openseq2seq log max": partial(preset, "openseq2seq", "LogMax"),
    "popart": partial(preset, "popart"),
    "chainer": partial(preset, "chainer"),
}
"""Policies by name: gradscale's own, and the presets of its peers."""

INEXACT = ("static 1000", "openseq2seq log max", "chainer")
"""Policies whose scales are not powers of two, so that scaling rounds. Weights agree within a tolerance then."""


class _Poisoned(torch.autograd.Function):
    """Returns its input; sets one element of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: int, value: float) -> Tensor:  # type: ignore[override]
        ctx.index, ctx.value = index, value
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        grad = grad.clone()
        poison(grad, ctx.index, ctx.value)
        return grad, None, None


def poison(grad: Tensor, index: int, value: float) -> None:
    """Sets one element of a gradient, of a sparse one one of its values; does nothing to an empty one."""
    values = grad._values() if grad.is_sparse else grad
    if values.numel():
        values.view(-1)[index % values.numel()] = value


class Model(nn.Module):
    """A model whose loss is linear in its parameters: the gradients are the coefficients of the batch."""

    total: Tensor
    batches: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        for parameter in setup.parameters:
            value = nn.Parameter(initial(parameter), requires_grad=parameter.trained)
            self.register_parameter(parameter.name, value)
        if setup.tied is not None:
            self.register_parameter("tied", self.get_parameter(setup.tied))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Tensor:
        """Returns the loss of a `Batch`, and updates the buffers in training, as BatchNorm does."""
        if self.training:
            self.total += batch.seen
            self.batches += 1
        terms = [self._term(name, batch) for name in batch.parameters]
        loss = torch.stack(terms).sum().to(DTYPES[self.setup.loss_dtype])
        return loss * batch.loss_factor + batch.loss_offset

    def _term(self, name: str, batch: Any) -> Tensor:
        parameter, tensor = self.setup.parameter(name), self.get_parameter(name)
        coefficients = batch.coefficients(parameter)
        for fault in batch.faults:
            if fault.parameter == name:
                tensor = _Poisoned.apply(tensor, fault.index, fault.value)  # type: ignore[assignment]
        if parameter.sparse:
            rows = torch.tensor(batch.rows(parameter), dtype=torch.int64)
            tensor, coefficients = nn.functional.embedding(rows, tensor, sparse=True), coefficients[rows]
        if parameter.through_half:
            tensor = tensor.half()
        if parameter.is_complex:
            return (tensor * coefficients.to(tensor.dtype).conj()).real.sum().float()
        wide = torch.float64 if parameter.dtype == "float64" else torch.float32
        return (tensor.to(wide) * coefficients.to(wide)).sum().float()


def names_of(groups: Sequence[Sequence[str]]) -> list[str]:
    """Returns every name in the groups of an optimizer, each once."""
    return list(dict.fromkeys(name for group in groups for name in group))
