"""The mode that looks at every operation of a step.

Running a mode loads torch's compiler, which takes a second. So this is imported by the first probe, and not by
`gradscale.torch`.
"""

import linecache
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradscale.torch.local import local
from gradscale.torch.probing.report import Operation, Origin, Source, TensorFacts, is_number_tensor
from gradscale.torch.wrappers import own_module, own_name

UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
"""Operators whose result holds whatever was in that memory."""

OVERWRITING = {
    *("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"),
    *("cauchy_", "geometric_", "set_", "_foreach_copy_", "_foreach_zero_"),
}
"""Operators in place that do not read what they write to."""

ONE_RESULT = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
"""Attention also returns the logarithms of sums for its backward pass, which may be infinite and padded."""

MASKED = ("softmax", *ONE_RESULT)
"""Parts of the names of operators that masks with -inf are made for."""

COLLECTIVES = {"c10d", "_c10d_functional", "fsdp"}
"""Namespaces of operators that fill memory they are given, which may not be complete when they return."""

MOST_REPEATED = 64
"""How many operations are repeated in float64, to know whether they overflowed."""

LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, sys.modules["gradscale"].__file__ or "")
)
"""Folders whose lines are not the user's."""

Module = tuple[str | None, str]
"""Path and class of a module; (None, "") is outside of the model."""

OUTSIDE: Module = (None, "")

Call = tuple[Any, Any, Any]
"""An operator, its arguments, and those with names."""


class ProbeMode(TorchDispatchMode):
    """Notes what every operation is given and returns, and where numbers that are not finite come from.

    Args:
        modules: those whose submodules, parameters and buffers are named. With several, the index comes first, as in
            the names of parameters.
        frames: how many operations are kept before the one that is not finite.
        outermost: the code that calls the user's: lines outside of it did not call an operation.

    Attributes:
        frames: the last operations.
        in_backward: whether the backward pass runs. Not by autograd's node: FSDP reduces gradients outside of one.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Sequence[nn.Module], frames: int, outermost: CodeType) -> None:
        super().__init__()
        self.in_backward = False
        self.frames: deque[Operation] = deque(maxlen=frames)
        self._count = 0
        self._outermost = outermost
        self._running: list[Module] = []
        self._hooks: list[Any] = []
        self._modules: dict[nn.Module, Module] = {}
        self._names: dict[int, str] = {}
        # By the memory that tensors are in. Every result of every operation is noted, so that memory that is used again
        # gets its new origin.
        self._names_by_memory: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}
        self._called_at: dict[int, tuple[Module, Source | None]] = {}
        self._repeated = 0
        self._first: Origin | None = None
        for index, root in enumerate(map(own_module, modules)):
            start = [str(index)] if len(modules) > 1 else []
            for name, part in root.named_modules():
                path = ".".join(filter(None, [*start, own_name(name, root) if name else ""]))
                self._modules.setdefault(part, (path, type(part).__name__))
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                path, held = ".".join([*start, own_name(name, root)]), local(tensor)
                self._names[id(tensor)] = path
                if type(held.detach()) is Tensor and held.layout is torch.strided and held.device.type != "meta":
                    self._names_by_memory[_memory(tensor)] = path

    def __enter__(self) -> "ProbeMode":
        """Follows which module's forward pass runs, by hooks on all of them."""
        for part in self._modules:
            self._hooks.append(part.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(part.register_forward_hook(self._leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._running.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, part: nn.Module, args: Any) -> None:
        self._running.append(self._modules[part])

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in COLLECTIVES:
            return self._collective(func, args, kwargs)
        name = _name(func)
        read = args[1:] if name in OVERWRITING else args
        inputs = _numbers([read, {key: value for key, value in kwargs.items() if key != "out"}])
        # Before the call, which may write to them, and make the node of another operation.
        before = self._operation(func, inputs)
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        outputs = _numbers(result)
        if name in UNINITIALIZED:
            for output in outputs:
                self._note(output, None)
            return result
        if name.startswith(ONE_RESULT) and "backward" not in name:
            outputs = outputs[:1]
        if outputs:
            operation = replace(before, outputs=tuple(map(TensorFacts.of, outputs)))
            self._count += 1
            self.frames.append(operation)
            self._trace((func, args, kwargs), operation, inputs, outputs)
        return result

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator that sends numbers; what it writes has the origin of what this rank has sent."""
        written: list[Tensor] = []
        sent: list[Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else sent).extend(_numbers(value))
        origin = next(self._known(sent, self._operation(func, sent)), None)
        result = func(*args, **kwargs)
        for tensor in written:
            self._note(tensor, origin)
        return result

    def _operation(self, func: Any, inputs: Sequence[Tensor]) -> Operation:
        """Returns an operation that is about to run, without its results.

        Its place is that of the call, or in the backward pass of the call that its node of autograd belongs to.
        """
        module, source = self._running[-1] if self._running else OUTSIDE, _users_line(self._outermost)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            # Autograd has made the node of the operation just before the call, with the last number that was given out.
            # An operation without one finds the number of an earlier node, which keeps its place.
            number = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]
            self._called_at.setdefault(number, (module, source))
        elif hasattr(node, "variable"):
            name = self._names.get(id(node.variable))
            owner = None if name is None else name.rpartition(".")[0]
            module = next((each for each in self._modules.values() if each[0] == owner), OUTSIDE)
        else:
            module, called = self._called_at.get(node._sequence_nr(), (module, None))
            source = source or called
        phase = "backward" if self.in_backward else "forward"
        return Operation(self._count, _name(func), phase, *module, source, tuple(map(TensorFacts.of, inputs)), ())

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Returns where the non-finite numbers in the memory of a tensor come from; None without such numbers."""
        return self._origins.get(_memory(tensor))

    def _note(self, tensor: Tensor, origin: Origin | None, *, partly: bool = False) -> None:
        """Notes the origin of what was written to a tensor; None if it is finite.

        Where it was written `partly`, in place, the rest of the memory keeps its origin.
        """
        held = local(tensor)
        if origin is not None:
            self._origins[_memory(tensor)] = origin
        elif not (partly and not held.is_sparse and held.nbytes < held.untyped_storage().nbytes()):
            self._origins.pop(_memory(tensor), None)

    def _known(self, inputs: Sequence[Tensor], operation: Operation) -> Iterator[Origin]:
        """Yields the origins of the inputs that are not finite."""
        for each, facts in zip(inputs, operation.inputs, strict=True):
            if not facts.finite:
                yield self.origin_of(each) or self._outside(each, operation)

    def _trace(self, call: Call, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Notes where the results of an operation have their non-finite numbers from."""
        known = list(self._known(inputs, operation))
        in_place = [any(output is each for each in inputs) for output in outputs]
        made: Origin | None = None
        for output, facts, partly in zip(outputs, operation.outputs, in_place, strict=True):
            origin = None if facts.finite else _inherited(known, operation.name, has_nan=math.isnan(facts.amax))
            if origin is None and not facts.finite:
                origin = made = made or self._made(call, operation, inputs, repeatable=not any(in_place))
            self._note(output, origin, partly=partly)

    def _outside(self, tensor: Tensor, operation: Operation) -> Origin:
        """Notes and returns the origin of numbers that the step did not make."""
        name = self._names.get(id(tensor)) or self._names_by_memory.get(_memory(tensor))
        if name is None and operation.phase == "backward":
            # Not an input, which the forward pass has shown. Collectives, as FSDP's reduction, write to memory that is
            # not among their results, and may bring the numbers of another rank.
            return self._first or Origin(operation, frames=tuple(self.frames))
        described = name or f"an input, {tensor.dtype} of shape {list(tensor.shape)}".replace("torch.", "")
        held = local(tensor.detach())
        # A mask: all that is not finite is -inf.
        intended = not isinstance(tensor, nn.Parameter) and held.is_floating_point()
        intended = intended and bool((torch.isfinite(held) | (held == -math.inf)).all())
        origin = Origin(operation, described, name is not None, intended, frames=tuple(self.frames))
        self._note(tensor, origin)
        return origin

    def _made(self, call: Call, operation: Operation, inputs: Sequence[Tensor], *, repeatable: bool) -> Origin:
        """Returns the origin of numbers that are not finite for the first time in the results of an operation."""
        # An infinite number was put there on purpose, one in a 0-d tensor too: `torch.where(mask, scores, -inf)`. Not
        # if it has become NaN at once, as in `(1 - mask) * -inf`.
        points = [float(each.detach()) for each in inputs if each.dim() == 0 and each.is_floating_point()]
        infinite = any(isinstance(each, float) and math.isinf(each) for each in [*tree_leaves(call[1:]), *points])
        intended = infinite and not any(math.isnan(each.amax) for each in operation.outputs)
        overflow = None
        if repeatable and not intended and operation.inputs_finite and self._repeated < MOST_REPEATED:
            self._repeated += 1
            overflow = _finite_in_float64(*call)
        made = Origin(operation, intended=intended, overflow=overflow, frames=tuple(self.frames))
        self._first = self._first or (None if intended else made)
        return made


def _inherited(inputs: Sequence[Origin], name: str, *, has_nan: bool) -> Origin | None:
    """Returns the origin that a result has from the inputs of its operation; None if the operation is the origin.

    An intended infinity passes through an operation as an infinity. Where it becomes NaN in one that takes masks, as in
    a softmax over a row that is masked as a whole, that operation is the origin. Where it becomes NaN in another, as in
    a product, a tensor that it came in with was no mask.
    """
    certain = next((origin for origin in inputs if not (origin.intended and has_nan)), None)
    if certain is not None or any(part in name for part in MASKED):
        return certain
    return next((replace(origin, intended=False) for origin in inputs if origin.outside is not None), None)


def _finite_in_float64(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Returns whether an operator gives finite numbers from the same inputs in float64; None if it cannot run so."""

    def wide(value: Any) -> Any:
        if is_number_tensor(value) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return None  # it would take random numbers from the operations that follow
    try:
        with torch.no_grad():
            result = func(*tree_map(wide, args), **tree_map(wide, kwargs))
        return all(TensorFacts.of(each).finite for each in _numbers(result))
    except (RuntimeError, NotImplementedError, TypeError):  # no kernel, or no float64, on this device
        return None


def _users_line(outermost: CodeType) -> Source | None:
    """Returns the innermost line that is neither torch's nor gradscale's; None if there is none inside `outermost`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<frozen ")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return Source(file, frame.f_lineno, frame.f_code.co_name, text)
        frame = frame.f_back
    return None


def _name(func: Any) -> str:
    """Returns the name of an operator, without its overload and torch's namespace."""
    return str(func).removeprefix("aten.").partition(".")[0]


def _numbers(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if is_number_tensor(each)]


def _memory(tensor: Tensor) -> int:
    held = local(tensor)
    return (held._values() if held.is_sparse else held).untyped_storage().data_ptr()
