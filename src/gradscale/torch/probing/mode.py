"""The mode that looks at every operation of a step."""

import linecache
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradscale.engine.probe_report import Operation, Origin, Source, TensorFacts
from gradscale.torch.gradients import local, numbers_of
from gradscale.torch.wrappers import own_module, own_name

UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
"""Operators whose result holds whatever was in that memory."""

OVERWRITING = {"copy_", "fill_", "_foreach_copy_", "zero_", "_foreach_zero_", "bernoulli_", "normal_", "uniform_"}
"""Operators in place that do not read what they write to, which may be memory that was never written."""

ONE_RESULT = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
"""Attention also returns the logarithms of sums for its backward pass, which may be infinite and padded."""

MASKED = ("softmax", *ONE_RESULT)
"""Parts of the names of operators that masks with -inf are made for."""

COLLECTIVES = {"c10d", "_c10d_functional", "fsdp"}
"""Namespaces of operators that fill memory they are given, which may not be complete when they return."""

LIBRARIES = tuple(f"{each.absolute()}{os.sep}" for each in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders whose lines are not the user's."""

Module = tuple[str | None, str]  # path and class; (None, "") is outside of the model


def facts_of(tensor: Tensor) -> TensorFacts:
    """Returns what is kept of a tensor of floating-point or complex numbers. Synchronizes with the device."""
    held, values = local(tensor.detach()), numbers_of(tensor.detach())
    wide = values.float() if values.dtype.itemsize < 2 else values  # FP8 has no kernel for a maximum
    amax = float(wide.abs().amax()) if wide.numel() and wide.device.type != "meta" else 0.0
    return TensorFacts(tuple(held.shape), str(held.dtype).removeprefix("torch."), amax)


def is_number_tensor(value: object) -> bool:
    """Returns whether `value` is a tensor whose numbers may be inf or NaN."""
    if not isinstance(value, Tensor) or value.layout not in (torch.strided, torch.sparse_coo):
        return False
    return value.is_floating_point() or value.is_complex()


class ProbeMode(TorchDispatchMode):
    """Notes what every operation is given and returns, and where numbers that are not finite come from.

    It is made by the code that calls the user's: lines outside of that did not call an operation. Submodules,
    parameters and buffers of `modules` are named, with several the index first.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.in_backward = False  # not by autograd's node: FSDP reduces gradients outside of one
        self._outermost = sys._getframe(1).f_code
        self._modules: dict[int, Module] = {}
        # Parameters and buffers, and the origins of numbers that are not finite, by the memory that they are in.
        self._names: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}
        self._first: Origin | None = None  # of those that an operation has made
        # Module and line of the operations of the forward pass, by the number that autograd gives their nodes.
        self._called_at: dict[int, tuple[Module | None, Source | None]] = {}
        for index, root in enumerate(map(own_module, modules)):
            start = [str(index)] if len(modules) > 1 else []
            for name, part in root.named_modules():
                path = ".".join([*start, *filter(None, [own_name(name)])])
                self._modules.setdefault(id(part), (path, type(part).__name__))
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                if type(local(tensor).detach()) is Tensor and is_number_tensor(tensor):
                    self._names[_memory(tensor)] = ".".join([*start, own_name(name)])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").partition(".")[0]
        read = args[1:] if name in OVERWRITING else args
        inputs = _numbers([read, {key: value for key, value in kwargs.items() if key != "out"}])
        if getattr(func, "namespace", "") in COLLECTIVES:
            # What they write, now or later, has the origin of what this rank has sent.
            sent = next((self._origins[each] for each in map(_memory, inputs) if each in self._origins), None)
            result = func(*args, **kwargs)
            self._note(_numbers([args, kwargs, result]), sent)
            return result
        # Before the call, which may write to its inputs, and make the node of another operation.
        before = self._operation(name, inputs)
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False) or name in UNINITIALIZED:
            return result
        outputs = _numbers(result)
        if name.startswith(ONE_RESULT) and "backward" not in name:
            outputs = outputs[:1]
        if outputs:
            operation = replace(before, outputs=tuple(map(facts_of, outputs)))
            self.operations.append(operation)
            origin = None if operation.finite else self._origin((func, args, kwargs), operation, inputs)
            # Finite results in memory of their own, which may have held others before; not those of a part in place.
            if origin is not None or not name.endswith("_"):
                self._note(outputs, origin)
        return result

    def _note(self, tensors: Iterable[Tensor], origin: Origin | None) -> None:
        """Notes where the numbers in tensors come from; None if they are finite, or that is not known."""
        for memory in map(_memory, tensors):
            self._origins.pop(memory, None)
            if origin is not None:
                self._origins[memory] = origin

    def found(self, tensors: Iterable[Tensor]) -> tuple[Origin, Sequence[Operation]]:
        """Returns the first origin of the non-finite numbers in tensors, and the operations up to that."""
        origins = [self._origins[memory] for memory in map(_memory, tensors) if memory in self._origins]
        unknown = self._first or Origin()
        first = min(origins, key=lambda each: each.operation.index if each.operation else 0, default=unknown)
        return first, self.operations[: first.operation and first.operation.index + 1]

    def _operation(self, name: str, inputs: Sequence[Tensor]) -> Operation:
        """Returns an operation that is about to run, without its results.

        Its place is that of the call, or in the backward pass of the call that its node of autograd belongs to.
        """
        module, source = self._place()
        node: Any = torch._C._current_autograd_node()
        if node is None:
            # Autograd has made the node of the operation just before the call, with the last number that was given out.
            # An operation without one finds the number of an earlier node, which keeps its place.
            number = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]
            self._called_at.setdefault(number, (module, source))
        else:
            called = self._called_at.get(node._sequence_nr(), (None, None))
            module, source = module or called[0], source or called[1]
        phase = "backward" if self.in_backward else "forward"
        facts = tuple(map(facts_of, inputs))
        return Operation(len(self.operations), name, phase, *(module or (None, "")), source, facts, ())

    def _place(self) -> tuple[Module | None, Source | None]:
        """Returns the module whose method runs, and the innermost line that is neither torch's nor gradscale's."""
        module, source = None, None
        for frame, line in walk_stack(sys._getframe(1)):
            if frame.f_code is self._outermost:
                break
            # By the stack, not by hooks: scripted modules have none, and no hook is called for `module.forward(x)`.
            module = module or self._modules.get(id(frame.f_locals.get("self")))
            file = frame.f_code.co_filename
            if source is None and not file.startswith((*LIBRARIES, "<frozen ")):
                source = Source(file, line, frame.f_code.co_name, linecache.getline(file, line).strip())
            if module and source:
                break
        return module, source

    def _origin(self, call: tuple[Any, Any, Any], operation: Operation, inputs: Sequence[Tensor]) -> Origin:
        """Returns the origin of the results of an operation that are not finite: that of an input, or the operation.

        An intended infinity passes through an operation as an infinity. Where it becomes NaN in one that takes masks,
        as in a softmax over a row that is masked as a whole, that operation is the origin. Where it becomes NaN in
        another, as in a product, an input of the step that it came in with was no mask.
        """
        facts = zip(inputs, operation.inputs, strict=True)
        bad = [each for each, of_it in facts if not of_it.finite]
        known = [self._origins.get(_memory(each)) or self._outside(each, operation) for each in bad]
        has_nan = any(math.isnan(each.amax) for each in operation.outputs)
        for origin in known:
            if not (origin.intended and has_nan):
                return origin
        for origin in known:
            if origin.outside is not None and not any(part in operation.name for part in MASKED):
                return replace(origin, intended=False)
        # An infinite number was put there on purpose, one in a 0-d tensor too: `torch.where(mask, scores, -inf)`. Not
        # if it has become NaN at once, as in `(1 - mask) * -inf`.
        given = [*tree_leaves(call[1:]), *(each.amax for each in operation.inputs if not each.shape)]
        if not has_nan and any(isinstance(each, float) and math.isinf(each) for each in given):
            return Origin(operation, intended=True)
        # What an operation in place was given is overwritten.
        repeats = operation.inputs_finite and not operation.name.endswith("_")
        made = Origin(operation, overflow=_finite_in_float64(*call) if repeats else None)
        self._first = self._first or made
        return made

    def _outside(self, tensor: Tensor, operation: Operation) -> Origin:
        """Notes and returns the origin of numbers that no operation of the step has returned."""
        name = self._names.get(_memory(tensor))
        if name is None and operation.phase == "backward":
            # No input, but what a collective as FSDP's reduction has written to memory that is not among its results.
            return self._first or Origin(operation)
        described = name or f"an input, {tensor.dtype} of shape {list(tensor.shape)}".replace("torch.", "")
        values = numbers_of(tensor.detach())
        # A mask: all that is not finite is -inf.
        intended = not isinstance(tensor, nn.Parameter) and bool((values.isfinite() | (values == -math.inf)).all())
        origin = Origin(operation, described, name is not None, intended)
        self._note([tensor], origin)
        return origin


def _finite_in_float64(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Returns whether an operator gives finite numbers from the same inputs in float64; None if it cannot run so."""

    def wide(value: Any) -> Any:
        if is_number_tensor(value) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        with torch.no_grad():
            result = func(*tree_map(wide, args), **tree_map(wide, kwargs))
        return all(facts_of(each).finite for each in _numbers(result))
    except (RuntimeError, NotImplementedError, TypeError):  # no kernel, or no float64, on this device
        return None


def _numbers(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if is_number_tensor(each)]


def _memory(tensor: Tensor) -> int:
    held = local(tensor)
    return (held._values() if held.is_sparse else held).untyped_storage().data_ptr()
