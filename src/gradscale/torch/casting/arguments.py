"""What happens to the arguments of a function that is to run in another precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Kind = Literal["half", "float", "promote"]


@dataclass(frozen=True, slots=True)
class Cast:
    """Runs functions on other floating-point types than they were called with.

    Attributes:
        kind: to `"half"`, to `"float"` (float32), or `"promote"`: to the widest type among the arguments.
        dtype: what half is; None is autocast's own type where autocast is on, and FP16 elsewhere.
    """

    kind: Kind
    dtype: torch.dtype | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns what `function` makes of the arguments, cast. Their gradients come back in the types they had.

        A single operation runs with autocast off, or autocast would have the last word on its inputs. So does what runs
        in float32. Other Python functions keep autocast: it casts the weights that they use beside their arguments.

        Args:
            function: what was called.
            args: with these.
            kwargs: and these. The `out` of an operation is left alone: a cast one would be written to in vain.
            op: whether `function` is an operation of torch's, not a Python function.
        """
        tensors = floating((args, {key: value for key, value in kwargs.items() if not (op and key == "out")}))
        if not tensors:
            return function(*args, **kwargs)
        dtype = self._target(tensors)
        cast_args = tuple(cast(value, dtype) for value in args)
        cast_kwargs = {key: value if op and key == "out" else cast(value, dtype) for key, value in kwargs.items()}
        with _autocast_off(tensors if op or self.kind == "float" else ()):
            return function(*cast_args, **cast_kwargs)

    def _target(self, tensors: list[Tensor]) -> torch.dtype:
        if self.kind == "promote":
            return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if self.kind == "float":
            return torch.float32
        return self.dtype or _half_of(tensors[0].device.type)


def floating(tree: Any) -> list[Tensor]:
    """Returns the floating-point tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with the floating-point tensors in it as `dtype`.

    float64 is left alone, as by autocast: who computes in it wants it. So is a container with nothing to cast, itself
    and not a copy, for the function may be meant to write to it.
    """
    leaves, shape = tree_flatten(value)
    wrong = [isinstance(leaf, Tensor) and _differs(leaf, dtype) for leaf in leaves]
    if not any(wrong):
        return value
    pairs = zip(leaves, wrong, strict=True)
    return tree_unflatten([leaf.to(dtype) if is_wrong else leaf for leaf, is_wrong in pairs], shape)


def autocasts(tensors: Iterable[Tensor]) -> bool:
    """Returns whether autocast is on for a device that one of the tensors is on."""
    return any(torch.is_autocast_enabled(kind) for kind in _device_types(tensors))


def _differs(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)


def _half_of(device_type: str) -> torch.dtype:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float16


def _device_types(tensors: Iterable[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


@contextmanager
def _autocast_off(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in _device_types(tensors):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
