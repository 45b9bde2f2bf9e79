"""The optimizers of the reference: torch's own, on the model's parameters and on float32 masters of 16-bit ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from tests.torch.fuzz.gradient import Gradient
from tests.torch.fuzz.model import Model
from tests.torch.fuzz.optimizers import make_optimizer
from tests.torch.fuzz.outcome import TorchRaises, Undefined
from tests.torch.fuzz.setup import DTYPES, OptimizerSetup, Setup, names_of
from torch import Tensor, nn


class PlainOptimizers:
    """All optimizers of a program.

    Attributes:
        groups: for each optimizer, the names of the parameters in its groups.
        masters: for each optimizer, the masters of its 16-bit parameters.
        written: for each optimizer, the parameters with masters that other code has written to since its last step.
    """

    def __init__(self, setup: Setup, model: Model) -> None:
        self._setup = setup
        self._model = model
        self.groups = [[list(group) for group in optimizer.groups] for optimizer in setup.optimizers]
        self.masters: list[dict[str, nn.Parameter]] = [
            {name: self._new_master(name) for name in names_of(optimizer.groups) if self.has_master(index, name)}
            for index, optimizer in enumerate(setup.optimizers)
        ]
        self.written: list[set[str]] = [set() for _ in setup.optimizers]
        self._optimizers = [
            make_optimizer(optimizer, lambda name, index=index: self.leaf(index, name))
            for index, optimizer in enumerate(setup.optimizers)
        ]

    def __getitem__(self, index: int) -> torch.optim.Optimizer:
        return self._optimizers[index]

    def __len__(self) -> int:
        return len(self._optimizers)

    def leaf(self, index: int, name: str) -> Tensor:
        """Returns the tensor that an optimizer steps: the master of a 16-bit parameter, or the parameter itself."""
        masters = self.masters[index]
        return masters[name] if name in masters else self._model.get_parameter(name)

    def names(self, indices: Sequence[int]) -> list[str]:
        """Returns the parameters of optimizers, each once, in their order."""
        return names_of([group for index in indices for group in self.groups[index]])

    def has_master(self, index: int, name: str) -> bool:
        """Returns whether an optimizer keeps a master for a parameter."""
        return self._setup.optimizers[index].storage is not None and self._setup.parameter(name).is_half

    def masters_of(self, name: str) -> OptimizerSetup | None:
        """Returns the optimizer that has a master for a parameter; None without one."""
        every = zip(self._setup.optimizers, self.masters, strict=True)
        return next((optimizer for optimizer, held in every if name in held), None)

    def gradient_dtype(self, name: str) -> torch.dtype:
        """Returns the type in which autograd accumulates the gradients of a parameter."""
        masters = self.masters_of(name)
        return torch.float32 if masters and masters.grad_fp32 else DTYPES[self._setup.parameter(name).dtype]

    def keep_half_gradients(self, indices: Sequence[int], gradients: Mapping[str, Gradient]) -> bool:
        """Returns whether one of them keeps masters and has FP16 gradients, which cannot be unscaled in place."""
        trained = (name for name in self.names(indices) if self._model.get_parameter(name).requires_grad)
        names = {*trained, *(name for name in self.names(indices) if name in gradients)}
        return any(self.masters_of(name) and self.gradient_dtype(name) is torch.float16 for name in names)

    def sharing(self, indices: Sequence[int], gradients: Mapping[str, Gradient]) -> list[int]:
        """Returns the optimizers that hold a gradient which they or another hold once more."""
        held = {
            index: [id(gradients[name]) for name in chain(*self.groups[index]) if name in gradients]
            for index in indices
        }
        count = Counter(chain(*held.values()))
        return [index for index, found in held.items() if any(count[each] > 1 for each in found)]

    def add_group(self, index: int, names: Sequence[str]) -> None:
        """Adds parameters to an optimizer; 16-bit ones get masters."""
        self.groups[index].append(list(names))
        self.masters[index] |= {name: self._new_master(name) for name in names if self.has_master(index, name)}
        self[index].add_param_group({"params": [self.leaf(index, name) for name in names]})

    def _new_master(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._model.get_parameter(name).detach().float())

    def give(self, index: int, gradients: Mapping[str, Gradient], *, makes_momentum: bool) -> None:
        """Gives an optimizer the gradients of the tensors that it steps."""
        self._adopt_written(index)
        given: dict[int, Tensor] = {}  # two parameters may have one gradient
        for name in self.names([index]):
            leaf, gradient = self.leaf(index, name), gradients.get(name)
            dtype = torch.float32 if name in self.masters[index] else self.gradient_dtype(name)
            leaf.grad = None if gradient is None else given.setdefault(id(gradient), gradient.as_torch(dtype))
        self._make_momentum(index, makes_momentum=makes_momentum)

    def _make_momentum(self, index: int, *, makes_momentum: bool) -> None:
        """Gives fused SGD the momentum of parameters whose first gradient came later than that of others."""
        # torch 2.13 raises for a list in which some are missing. Zeros are exact without dampening, and gradscale makes
        # them; under `NoScaling` it only calls the optimizer.
        optimizer = self[index]
        for group in optimizer.param_groups:
            if not (isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]):
                continue
            stepped = [leaf for leaf in group["params"] if leaf.grad is not None]
            missing = [leaf for leaf in stepped if optimizer.state[leaf].get("momentum_buffer") is None]
            torchs_own = group["dampening"] or not makes_momentum
            if torchs_own and missing and len(missing) < len(stepped):
                raise TorchRaises("Fused SGD with momentum, and a first gradient later than others.")
            for leaf in [] if torchs_own else missing:
                optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)

    def take_back(self, index: int, gradients: Mapping[str, Gradient]) -> None:
        """Ends a step: takes over what was left in `.grad`, and rounds the masters into the weights.

        torch's foreach SGD with Nesterov momentum, for instance, adds the momentum to `.grad`.
        """
        names = [name for name in self.names([index]) if name in gradients]
        for name in names:
            gradient, grad = gradients[name], self.leaf(index, name).grad
            if name not in self.masters[index] and gradient.rows is None and grad is not None:
                gradient.values = grad.to(gradient.values.dtype)
        storage = self._setup.optimizers[index].storage
        with torch.no_grad():
            for name in names:
                if name in self.masters[index]:
                    weight, master = self._model.get_parameter(name), self.masters[index][name]
                    weight.copy_(master)
                    if storage != "fp32" and bool((master.isfinite() & ~weight.isfinite()).any()):
                        raise Undefined("A weight leaves the range of its type, and its master is made from it.")
        for other in range(len(self)):
            if other != index:
                self.note_written(names, [other])

    def load_checkpoint(self) -> None:
        """Loads what it saves. torch casts some numbers then: `mu_product` of NAdam gets the type of its parameter."""
        for optimizer, setup in zip(self._optimizers, self._setup.optimizers, strict=True):
            if setup.storage is None:
                optimizer.load_state_dict(optimizer.state_dict())

    def note_written(self, names: Sequence[str], indices: Sequence[int] | None = None) -> None:
        """Notes that other code has written to weights, for all optimizers or for some."""
        for index in range(len(self)) if indices is None else indices:
            self.written[index] |= {name for name in names if name in self.masters[index]}

    @torch.no_grad()
    def _adopt_written(self, index: int) -> None:
        """Makes a weight that other code has written to the master."""
        for name in self.written[index]:
            master, weight = self.masters[index][name], self._model.get_parameter(name)
            # The plain storage keeps the low bits where they still round to the weight.
            kept = (master.to(weight.dtype) == weight) & (self._setup.optimizers[index].storage == "fp32")
            master.copy_(torch.where(kept, master, weight.float()))
        self.written[index] = set()
