"""The mode that looks at every operation of a step.

Running a mode loads torch's compiler, which takes a second. So this is imported by the first probe, and not by
`gradscale.torch`.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradscale.torch.local import local
from gradscale.torch.probing.operation import Operation, Source, TensorFacts, is_number_tensor
from gradscale.torch.probing.origins import Origin, Origins, has_infinite_number, inherited, is_mask
from gradscale.torch.probing.places import OUTSIDE, Module, ModuleStack, users_line

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


class ProbeMode(TorchDispatchMode):
    """Notes what every operation is given and returns, and where numbers that are not finite come from.

    Args:
        stack: the modules that run.
        tensors: parameters and buffers of the model, by name.
        frames: how many operations are kept before the one that is not finite.
        outermost: the code that calls the user's.

    Attributes:
        origins: where numbers that are not finite come from.
        operations: how many operations have run.
        in_backward: whether the backward pass runs. Not by autograd's node: FSDP reduces gradients outside of one.
    """

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack, tensors: Mapping[str, Tensor], frames: int, outermost: CodeType) -> None:
        super().__init__()
        self.origins = Origins()
        self.operations = 0
        self.in_backward = False
        self.frames: deque[Operation] = deque(maxlen=frames)
        self._stack = stack
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._memory = {_storage(local(tensor)): name for name, tensor in tensors.items() if _plain(local(tensor))}
        self._outermost = outermost
        self._called_at: dict[int, tuple[Module, Source | None]] = {}
        self._repeated = 0
        self._first: Origin | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in COLLECTIVES:
            return self._collective(func, args, kwargs)
        name = _name(func)
        inputs = _read(name, args, kwargs)
        # Before the call, which may write to them, and make the node of another operation.
        before = self._operation(func, torch._C._current_autograd_node(), [TensorFacts.of(each) for each in inputs])
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        outputs = [each for each in tree_leaves(result) if is_number_tensor(each)]
        if name in UNINITIALIZED:
            for output in outputs:
                self.origins.note(output, None)
            return result
        if name.startswith(ONE_RESULT) and "backward" not in name:
            outputs = outputs[:1]
        if outputs:
            operation = replace(before, outputs=tuple(map(TensorFacts.of, outputs)))
            self.operations += 1
            self.frames.append(operation)
            self._note(func, args, kwargs, operation, inputs, outputs)
        return result

    def _operation(self, func: Any, node: Any, given: Sequence[TensorFacts]) -> Operation:
        """Returns an operation that is about to run, without its results."""
        module, source = self._place(node)
        return Operation(
            self.operations,
            _name(func),
            "backward" if self.in_backward else "forward",
            *module,
            source,
            tuple(given),
            (),
        )

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator that sends numbers; what it writes has the origin of what this rank has sent."""
        written: list[Tensor] = []
        sent: list[Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            tensors = [each for each in tree_leaves(value) if is_number_tensor(each)]
            (written if argument.alias_info is not None and argument.alias_info.is_write else sent).extend(tensors)
        operation = self._operation(func, torch._C._current_autograd_node(), list(map(TensorFacts.of, sent)))
        bad = [each for each, facts in zip(sent, operation.inputs, strict=True) if not facts.finite]
        origin = next((self.origins.of(each) or self._outside(each, operation) for each in bad), None)
        result = func(*args, **kwargs)
        for tensor in written:
            self.origins.note(tensor, origin)
        return result

    def _place(self, node: Any) -> tuple[Module, Source | None]:
        """Returns the module and the user's line of the operation that runs, or that a node of autograd belongs to."""
        line = users_line(self._outermost)
        if node is None:
            place = self._stack.innermost, line
            # Autograd has made the node of the operation just before the call, with the last number that was given out.
            # An operation without one finds the number of an earlier node, which keeps its place.
            self._called_at.setdefault(torch.autograd._get_sequence_nr() - 1, place)  # pyright: ignore[reportPrivateImportUsage]
            return place
        if hasattr(node, "variable"):
            name = self._names.get(id(node.variable))
            return OUTSIDE if name is None else self._stack.owner(name), line
        module, called = self._called_at.get(node._sequence_nr(), (self._stack.innermost, None))
        return module, line or called

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        operation: Operation,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Notes where the results of an operation have their non-finite numbers from."""
        bad = [each for each, facts in zip(inputs, operation.inputs, strict=True) if not facts.finite]
        known = [self.origins.of(each) or self._outside(each, operation) for each in bad]
        takes_masks = any(part in operation.name for part in MASKED)
        new: Origin | None = None
        for output, facts in zip(outputs, operation.outputs, strict=True):
            origin = None
            if not facts.finite:
                origin = inherited(known, has_nan=math.isnan(facts.amax), takes_masks=takes_masks)
                if origin is None:
                    origin = new = new or self._made(func, args, kwargs, operation, inputs, outputs)
            self.origins.note(output, origin, partly=any(output is each for each in inputs))

    def _outside(self, tensor: Tensor, operation: Operation) -> Origin:
        """Notes and returns the origin of numbers that the step did not make."""
        held = local(tensor)
        name = self._names.get(id(tensor)) or (self._memory.get(_storage(held)) if _plain(held) else None)
        if name is None and operation.phase == "backward":
            # Not an input, which the forward pass has shown. Collectives, as FSDP's reduction, write to memory that is
            # not among their results, and may bring the numbers of another rank.
            return self._first or Origin(operation, frames=tuple(self.frames))
        described = name or f"an input, {tensor.dtype} of shape {list(tensor.shape)}".replace("torch.", "")
        intended = not isinstance(tensor, torch.nn.Parameter) and is_mask(tensor)
        origin = Origin(operation, described, name is not None, intended, frames=tuple(self.frames))
        self.origins.note(tensor, origin)
        return origin

    def _made(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        operation: Operation,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Origin:
        """Returns the origin of numbers that are not finite for the first time in the results of an operation."""
        numbers = [*tree_leaves(args), *tree_leaves(kwargs)]
        # An infinity of a 0-d tensor is a number, too: `torch.where(mask, scores, -inf)`.
        points = [float(each.detach()) for each in inputs if each.dim() == 0 and each.is_floating_point()]
        # Not if it has become NaN at once, as in `(1 - mask) * -inf`.
        has_nan = any(math.isnan(each.amax) for each in operation.outputs)
        intended = not has_nan and has_infinite_number([*numbers, *points])
        overflow = None
        written = any(output is each for output in outputs for each in inputs)
        if not (intended or written) and operation.inputs_finite and self._repeated < MOST_REPEATED:
            self._repeated += 1
            overflow = _finite_in_float64(func, args, kwargs)
        made = Origin(operation, intended=intended, overflow=overflow, frames=tuple(self.frames))
        self._first = self._first or (None if intended else made)
        return made


def _name(func: Any) -> str:
    """Returns the name of an operator, without its overload and torch's namespace."""
    return str(func).removeprefix("aten.").partition(".")[0]


def _read(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors of numbers that an operator reads."""
    if name in OVERWRITING:
        args = args[1:]
    given = tree_leaves([args, {key: value for key, value in kwargs.items() if key != "out"}])
    return [each for each in given if is_number_tensor(each)]


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
        return all(TensorFacts.of(each).finite for each in tree_leaves(result) if is_number_tensor(each))
    except (RuntimeError, NotImplementedError, TypeError):  # no kernel, or no float64, on this device
        return None


def _plain(tensor: Tensor) -> bool:
    return type(tensor.detach()) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
