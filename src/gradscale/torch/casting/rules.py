"""What is done to a call: `Cast` casts its arguments, `Ban` rejects half precision. The decorators apply a `Cast`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from gradscale.torch.cast import HALF_DTYPES, cast, tensors_in
from gradscale.torch.casting.catching import Function, functions_by_name, plain_name

P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["half", "float", "promote"]


@dataclass(frozen=True, slots=True)
class Cast:
    """A rule that casts the floating-point arguments. Gradients have the dtypes that the arguments had.

    Attributes:
        to: `"half"`, `"float"` (float32), or `"promote"`: the widest dtype among the arguments.
        operation: whether it is for a torch operation, not for a Python function.
        dtype: the half dtype; None is autocast's own where autocast is enabled, and FP16 elsewhere.
    """

    to: Precision
    operation: bool = False
    dtype: torch.dtype | None = None

    def __call__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of the call with cast arguments."""
        # `out` of an operation is not cast: the result would be written to the copy.
        inputs = {key: value for key, value in kwargs.items() if not (self.operation and key == "out")}
        tensors = floating(args, inputs)
        if not tensors:
            return function(*args, **kwargs)
        castable = {tensor.dtype for tensor in tensors} - {torch.float64}  # which autocast leaves alone, too
        args, inputs = cast((args, inputs), self._target(tensors), castable)
        # Autocast would cast the inputs of an operation once more. A Python function keeps it, since autocast casts the
        # weights that the function uses beside its arguments, unless it is to run in float32 altogether.
        devices = autocast_devices(tensors) if self.operation or self.to == "float" else []
        return without_autocast(devices, function, args, {**kwargs, **inputs})

    def _target(self, tensors: list[Tensor]) -> torch.dtype:
        if self.to == "promote":
            return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if self.to == "float":
            return torch.float32
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float16
        return self.dtype or autocast


@dataclass(frozen=True, slots=True)
class Ban:
    """A rule that raises an error if a function is called with half-precision tensors.

    Attributes:
        reason: what goes wrong, and what to use instead: complete sentences.
        dtypes: the dtypes it goes wrong in.
        safe_under: device types whose autocast runs the function in float32, where that makes it safe.
    """

    reason: str
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    safe_under: tuple[str, ...] = ()

    def __call__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of the call.

        Raises:
            RuntimeError: an argument is of a dtype that the function is unsafe in.
        """
        for tensor in floating(args, kwargs):
            is_safe = tensor.device.type in self.safe_under and torch.is_autocast_enabled(tensor.device.type)
            if tensor.dtype in self.dtypes and not is_safe:
                raise RuntimeError(
                    f"`{function.__name__}` is unsafe in half precision. Received: a tensor of {tensor.dtype}. "
                    f"{self.reason} To allow it: `casts(allow=[...])`."
                )
        return function(*args, **kwargs)


_FP16_BAN = partial(Ban, dtypes=(torch.float16,), safe_under=("cuda",))
_ATANH_BAN = Ban("A value near 1 is rounded to 1, whose atanh is inf. Keep the value from before the `tanh`.")
_ACOS_BAN = Ban(
    "A cosine near 1 is rounded to 1: the angle is 0, and its gradient infinite. Use `atan2(sine, cosine)`."
)

BANNED: dict[Function, Ban] = {
    # The inputs of these have lost the digits that matter when they were rounded to half. Computing in float32 is too
    # late: CUDA's autocast raises an error for the first for that reason, and the CPU's returns a wrong loss.
    functional.binary_cross_entropy: Ban(
        "A probability near 1 is rounded to 1, and its loss to 100, whatever the logit was. Use "
        "`binary_cross_entropy_with_logits` on the logits, and no sigmoid."
    ),
    torch.logit: Ban(
        "A probability near 1 is rounded to 1, whose logit is inf. Keep the logits that it was made from."
    ),
    torch.atanh: _ATANH_BAN,
    torch.arctanh: _ATANH_BAN,
    torch.erfinv: Ban("A value near 1 is rounded to 1, whose erfinv is inf. Keep the value from before the `erf`."),
    torch.acos: _ACOS_BAN,
    torch.arccos: _ACOS_BAN,
    # CUDA's autocast runs both (the first: its norm) in float32, by its documented list. The CPU's does not.
    functional.normalize: _FP16_BAN(
        "Its `eps` of 1e-12 is 0 in FP16: a row of zeros becomes NaN, and one longer than 65504 becomes 0. "
        "Use `normalize(x.float(), ...)`."
    ),
    functional.cosine_similarity: _FP16_BAN(
        "Its `eps` of 1e-8 is 0 in FP16: a row of zeros gives NaN, and one longer than 65504 gives 0. "
        "Use `cosine_similarity(x.float(), y.float(), ...)`."
    ),
}
"""The functions that `casts` does not run on half-precision tensors, unless they are allowed."""


@cache
def bans() -> dict[Function, Ban]:
    """Returns `BANNED` with all aliases of each function, in-place ones included."""
    return {
        alias: ban
        for function, ban in BANNED.items()
        for name in (plain_name(function), f"{plain_name(function)}_")
        for alias in functions_by_name().get(name, ())
    }


def half_function(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with its floating-point arguments cast to autocast's dtype wherever autocast is enabled.

    >>> import torch
    >>> @half_function
    ... def similarity(a, b):
    ...     return a @ b.T
    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     similarity(torch.ones(2, 3), torch.ones(2, 3)).dtype
    torch.float16
    """
    return _under_autocast(function, Cast("half"))


def float_function(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with its floating-point arguments cast to float32 and autocast off, wherever it is on.

    >>> import torch
    >>> @float_function
    ... def energy(x):
    ...     return x.square().sum()
    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     energy(torch.full((4,), 300.0, dtype=torch.float16))
    tensor(360000.)
    """
    return _under_autocast(function, Cast("float"))


def promote_function(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with its floating-point arguments cast to the widest dtype among them under autocast.

    >>> import torch
    >>> @promote_function
    ... def join(parts):
    ...     return [part.dtype for part in parts]
    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     join([torch.ones(2), torch.ones(2, dtype=torch.float16)])
    [torch.float32, torch.float32]
    """
    return _under_autocast(function, Cast("promote"))


def _under_autocast(function: Callable[P, R], rule: Cast) -> Callable[P, R]:
    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> R:
        if autocast_devices(floating(args, kwargs)):
            return rule(function, args, kwargs)
        return function(*args, **kwargs)

    return decorated


def floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors among arguments, and in nested containers of them."""
    return [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_floating_point()]


def autocast_devices(tensors: Iterable[Tensor]) -> list[str]:
    """Returns the device types of the tensors for which autocast is enabled."""
    return [device for device in {tensor.device.type for tensor in tensors} if torch.is_autocast_enabled(device)]


def without_autocast(devices: Sequence[str], function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call with autocast disabled on some device types."""
    # One block in the other, and no `ExitStack`, which the compiler of torch 2.6 does not trace.
    if not devices:
        return function(*args, **kwargs)
    with torch.autocast(devices[0], enabled=False):
        return without_autocast(devices[1:], function, args, kwargs)
