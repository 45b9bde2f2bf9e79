"""Hooks that count every tensor of a model by its powers of two, forward and backward, while they are attached."""

import re
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS
from gradscale.kernels.torch import as_real, largest
from gradscale.kernels.torch_exponents import count_exponents
from gradscale.kernels.torch_pieces import MOST, Pieces
from gradscale.torch.cast import tensors_in
from gradscale.torch.probing.run import probing
from gradscale.torch.step.gradients import numbers_of
from gradscale.torch.wrappers import own_module, own_name
from gradscale.watching.counted import Counted, counted_of, unscaling_bits
from gradscale.watching.sample import KINDS, MODEL, Key, Kind, Sample

SMALL = MOST // 2
"""Elements up to which a tensor is copied. For larger ones calls of torch do not matter."""

NOTHING = np.zeros((0, EXPONENTS.size), np.int64), np.zeros((0, 3), np.int64), np.zeros(0)
"""What is counted of no tensor."""


class LeftOut:
    """A hook that a copy or a pickle of the model does not take along: there it does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (_ignore,)


def _ignore(*args: Any) -> None:
    del args


class Recorder:
    """Records a model's tensors between `attach` and `detach`.

    Args:
        model: whose modules are recorded, without wrappers around it.
        layers: a regular expression; modules in whose name it is found are recorded, with their own parameters.
        scale_of: returns the scale of the loss.
        kinds: what is recorded.
    """

    def __init__(
        self, model: nn.Module, layers: str, scale_of: Callable[[], float], kinds: Collection[Kind] = KINDS
    ) -> None:
        self._model = own_module(model)
        self._layers = re.compile(layers)
        self._scale_of = scale_of
        self._kinds = kinds
        self._handles: list[RemovableHandle] = []
        self._begin()

    def attach(self) -> None:
        """Registers hooks on every chosen module and parameter."""
        for wrapped_name, module in self._model.named_modules():
            if not self._layers.search(name := own_name(wrapped_name, self._model)):
                continue
            self._handles.append(module.register_forward_hook(LeftOut(partial(self._forward, name)), with_kwargs=True))
            for key, parameter in _parameters(name, module, "weight_grad"):
                if parameter.requires_grad and "weight_grad" in self._kinds:
                    record = partial(self._weight_grad, key)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(record))

    def detach(self) -> Sample:
        """Removes every hook, and returns what was recorded since `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        sample = Sample(self._slots, self._counter.counted())
        self._begin()
        return sample

    def _begin(self) -> None:
        """Forgets what was recorded."""
        self._counter = Counter()
        self._slots: dict[Key, list[int]] = {}
        self._without_gradients: set[str] = set()
        # By the identity of a tensor: a weak reference to it, its version, the scale, and where it was counted.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, float, int]] = {}

    def _forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if probing.get() or not self._is_first_pass(name):
            return
        shown = name or MODEL
        for key, parameter in _parameters(name, module, "weight"):
            if key not in self._slots:
                self._add(key, parameter)
        self._add((shown, "input"), (args, kwargs))
        self._add((shown, "output"), output)
        for tensor in _floating(output):
            if tensor.requires_grad and "output_grad" in self._kinds:
                record = partial(self._output_grad, (shown, "output_grad"), [])
                self._handles.append(tensor.register_hook(record))

    def _is_first_pass(self, name: str) -> bool:
        """Returns whether a forward pass is of training, and not one of numbers that are recorded already."""
        if not torch.is_grad_enabled():
            # Validation, or the first pass of a checkpointed module, which is run again with gradients.
            self._without_gradients.add(name)
            return False
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateImportUsage]
            return True
        # Inside of a backward pass it is run again. Checkpoints that are not reentrant had gradients the first time.
        return name in self._without_gradients

    def _output_grad(self, key: Key, last: list[tuple[int, float]], grad: Tensor) -> None:
        """Adds the gradient of an output; `last` is where that of its last backward pass was counted, and its scale."""
        scale, slots = self._scale_of(), self._slots.setdefault(key, [])
        # A pass that has overflowed is run again at a lower scale, and its gradients are not used.
        if last and last[0][1] != scale:
            slots.remove(last[0][0])
        self._add(key, grad, scale)
        last[:] = [(slots[-1], scale)]

    def _weight_grad(self, key: Key, parameter: Tensor) -> None:
        if parameter.grad is not None:
            # Replaced, not added: `.grad` is the sum of all backward passes of the step so far.
            self._slots[key] = [self._counter.add(parameter.grad, self._scale_of())]

    def _add(self, key: Key, values: Any, scale: float = 1.0) -> None:
        """Adds the tensors in `values`. One that is the output of a module and the input of others is counted once."""
        for tensor in _floating(values) if key[1] in self._kinds else ():
            known = self._known.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1:3] != (tensor._version, scale):
                known = weakref.ref(tensor), tensor._version, scale, self._counter.add(tensor, scale)
                self._known[id(tensor)] = known
            self._slots.setdefault(key, []).append(known[3])


def _floating(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(values) if tensor.is_floating_point() or tensor.is_complex())


def _parameters(name: str, module: nn.Module, kind: Kind) -> Iterator[tuple[Key, Tensor]]:
    """Yields the own parameters of a module, each with its key."""
    for own, parameter in module._parameters.items():
        if parameter is not None:
            yield (f"{name}.{own}" if name else own, kind), parameter


class Counter:
    """Counts tensors as they are when they are added.

    Small tensors are copied and counted together: a dozen calls of torch for each of them would take longer than
    counting. On an accelerator this also synchronizes once for many of them.
    """

    def __init__(self) -> None:
        self._pieces: dict[torch.device, tuple[Pieces, list[int]]] = {}
        self._order: list[int] = []
        self._parts: list[tuple[FloatArray, FloatArray, FloatArray]] = [NOTHING]
        self._dtypes: list[torch.dtype] = []
        self._scales: list[float] = []
        self._shifts: list[int] = []

    def add(self, tensor: Tensor, scale: float = 1.0) -> int:
        """Returns the position of a tensor, whose numbers divided by `scale` are counted."""
        numbers = numbers_of(tensor.detach())
        if numbers.is_complex():
            numbers = as_real(numbers)
        slot, bits = len(self._dtypes), unscaling_bits(scale)
        self._dtypes.append(tensor.dtype)
        self._scales.append(scale)
        self._shifts.append(bits or 0)
        if bits is None:
            numbers = (numbers.float() if numbers.dtype.itemsize < 4 else numbers) / scale
        if not 0 < numbers.numel() <= SMALL or numbers.dtype is torch.float64:
            self._order.append(slot)
            self._parts.append(_counted_alone(numbers))
            return slot
        if numbers.device not in self._pieces:
            self._pieces[numbers.device] = Pieces(numbers.device), []
        pieces, slots = self._pieces[numbers.device]
        if not pieces.fits(numbers.numel()):
            self._flush(pieces, slots)
        pieces.add(numbers)
        slots.append(slot)
        return slot

    def counted(self) -> Counted:
        """Returns what was counted."""
        for pieces, slots in self._pieces.values():
            self._flush(pieces, slots)
        bins, outside, amax = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        rows = np.argsort(self._order).tolist()
        return counted_of(bins, outside, amax, self._dtypes, self._scales, self._shifts, rows)

    def _flush(self, pieces: Pieces, slots: list[int]) -> None:
        if slots:
            self._order += slots
            self._parts.append(pieces.counted())
            slots.clear()


def _counted_alone(numbers: Tensor) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns what `Pieces` do, of one tensor."""
    found = count_exponents(numbers)
    wide = numbers.float() if numbers.dtype.itemsize == 1 else numbers  # FP8 has no kernel for a maximum
    amax = largest([wide], numbers.device).cpu().numpy()
    return found.host_counts[None], np.array([[found.zeros, found.infs, found.nans]]), amax
