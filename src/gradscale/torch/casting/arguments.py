"""What happens to the arguments of a function that is to run in another precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

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
        out = {"out": kwargs["out"]} if op and "out" in kwargs else {}
        inputs = {key: value for key, value in kwargs.items() if key not in out}
        tensors = floating(args, inputs)
        if not tensors:
            return function(*args, **kwargs)
        dtype = self._target(tensors)
        args = tuple(cast(value, dtype) for value in args)
        inputs = {key: cast(value, dtype) for key, value in inputs.items()}
        devices = autocast_devices(tensors) if op or self.kind == "float" else []
        with _autocast_off(devices) if devices else nullcontext():
            return function(*args, **inputs, **out)

    def _target(self, tensors: list[Tensor]) -> torch.dtype:
        if self.kind == "promote":
            return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if self.kind == "float":
            return torch.float32
        return self.dtype or _half_of(tensors[0].device.type)


def floating(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors among arguments, and in nested lists, tuples and dicts of them."""
    return [leaf for value in (*args, *kwargs.values()) for leaf in _leaves(value) if _is_floating(leaf)]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with the floating-point tensors in it as `dtype`.

    float64 is left alone, as by autocast: who computes in it wants it. So is a container with nothing to cast, itself
    and not a copy, for the function may be meant to write to it.
    """
    if not any(_differs(leaf, dtype) for leaf in _leaves(value)):
        return value
    if isinstance(value, Tensor):
        return value.to(dtype)
    return tree_map(lambda leaf: leaf.to(dtype) if _differs(leaf, dtype) else leaf, value)


def autocast_devices(tensors: Iterable[Tensor]) -> list[str]:
    """Returns the types of device on which one of the tensors is and autocast is on."""
    return [kind for kind in {tensor.device.type for tensor in tensors} if torch.is_autocast_enabled(kind)]


def _leaves(value: Any) -> Sequence[Any]:
    # Most arguments are tensors and numbers, and what pytree takes to find that out is most of the cost of a call.
    return (value,) if isinstance(value, _LEAVES) else tree_leaves(value)


_LEAVES = (Tensor, int, float, str, NoneType)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _differs(value: Any, dtype: torch.dtype) -> bool:
    return _is_floating(value) and value.dtype not in (dtype, torch.float64)


def _half_of(device_type: str) -> torch.dtype:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float16


@contextmanager
def _autocast_off(devices: Iterable[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in devices:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
