"""`casts` and its decorators: which functions run in which precision, on top of autocast or without it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import cache, partial, reduce, wraps
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradscale.torch.cast import HALF_DTYPES, cast, tensors_in
from gradscale.torch.casting import catching
from gradscale.torch.casting.catching import RULES, Function, patch_for, plain_name, torch_aliases

__all__ = ["casts", "float_function", "half_function", "promote_function"]

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
        for alias in catching.functions_by_name().get(name, ())
    }


class casts(TorchFunctionMode, ContextDecorator):
    """Runs the listed functions in the precision they are listed under, and rejects unsafe ones in half precision.

    >>> x = torch.full((4,), 300.0, dtype=torch.float16)
    >>> x.square()
    tensor([inf, inf, inf, inf], dtype=torch.float16)
    >>> with casts(float=[torch.square]):
    ...     x.square()
    tensor([90000., 90000., 90000., 90000.])

    Also a decorator. Floating-point tensors in the arguments are cast, in nested containers too; gradients have the
    dtypes that the arguments had. A function is the object that is called: one of torch's, with all its aliases; an
    operator of `torch.ops`; a Python function or method of any library, or of your own.

    Contexts nest: the inner one takes precedence, and the outer one holds for what it does not list. Other threads are
    not affected. Every call of a torch function inside takes some microseconds longer. Does not synchronize with the
    device.

    Args:
        half: run in half precision.
        float: run in float32, with autocast disabled.
        promote: run in the widest dtype among the arguments.
        dtype: the half dtype, FP16 or BF16; by default autocast's own where autocast is enabled, and FP16 elsewhere.
        banned: functions that must not get half-precision tensors, with the reason, beside the known unsafe ones.
        allow: functions that may get them although they are known to be unsafe.

    Raises:
        TypeError: calls of a function cannot be caught.
        ValueError: a function is listed twice, or is unsafe in half precision.
        RuntimeError: inside, an unsafe function gets half-precision tensors, or TorchScript with a listed function is
            called.
    """

    def __init__(
        self,
        *,
        half: Iterable[Function] = (),
        float: Iterable[Function] = (),
        promote: Iterable[Function] = (),
        dtype: torch.dtype | None = None,
        banned: Mapping[Function, str] | None = None,
        allow: Iterable[Function] = (),
    ) -> None:
        if dtype is not None and dtype not in HALF_DTYPES:
            raise ValueError(f"`dtype` must be torch.float16 or torch.bfloat16. Received: dtype={dtype!r}.")
        super().__init__()
        self._rules: dict[Function, Cast | Ban] = {}
        self._patches = list(catching.SCRIPTS)
        self._allowed = {alias for function in allow for alias in _caught("allow", function)}
        lists: dict[Precision, Iterable[Function]] = {"half": half, "float": float, "promote": promote}
        for to, functions in lists.items():
            for function in functions:
                self._list(to, function, Cast(to, bool(torch_aliases(function)), dtype))
        for function, reason in (banned or {}).items():
            self._list("banned", function, Ban(reason))

    def __enter__(self) -> "casts":
        outer = bans() | RULES.items[-1]
        # `allow` lifts bans, not casts of an outer context.
        lifted = {alias: None for alias in self._allowed if isinstance(outer.get(alias), Ban)}
        RULES.items.append(outer | lifted | self._rules)
        for patch in self._patches:
            patch.install()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for patch in self._patches:
            patch.remove()
        RULES.items.pop()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a call of a torch function, under the rule that holds for it."""
        rule, kwargs = RULES.items[-1].get(func), kwargs or {}
        if rule is None:
            return func(*args, **kwargs)
        # torch calls the modes of outer contexts next, and their rules must not be applied as well.
        RULES.items.append({})
        try:
            return rule(func, args, kwargs)
        finally:
            RULES.items.pop()

    def _list(self, parameter: str, function: Function, rule: Cast | Ban) -> None:
        aliases = _caught(parameter, function)
        if aliases & self._rules.keys():
            raise ValueError(
                "A function must be listed once, under one of its names. "
                f"Received: {_named(function)} in `{parameter}`, and before. Take it out of one of the two."
            )
        if parameter == "half" and (ban := bans().get(function)) and not aliases <= self._allowed:
            raise ValueError(
                "`half` must not list functions that are unsafe in half precision. "
                f"Received: {_named(function)}. {ban.reason} "
                "To allow it: `casts(half=[...], allow=[...])`."
            )
        self._rules |= dict.fromkeys(aliases, rule)
        if not torch_aliases(function):
            self._patches.append(patch_for(function))


def _caught(parameter: str, function: Any) -> frozenset[Function]:
    """Returns the objects by which calls of a listed function are recognized: its aliases in torch, or itself."""
    name = plain_name(function)
    if aliases := torch_aliases(function):
        if parameter != "allow" and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            raise TypeError(
                f"`{parameter}` must not list functions that write to their argument: they would write to a copy. "
                f"Received: {_named(function)}. List the one that returns its result, and call that."
            )
        return aliases
    if isinstance(function, FunctionType) and patch_for(function).places():
        return frozenset([patch_for(function).function])
    raise TypeError(
        f"`{parameter}` takes functions whose calls can be caught: torch's own, operators of `torch.ops`, and Python "
        f"functions and methods found under their name in a module or class. Received: {_named(function)}. "
        + (
            "Name a method of the class, such as `LayerNorm.forward`."
            if isinstance(function, type | nn.Module)
            else "Call it from a function decorated with `half_function`, `float_function` or `promote_function`."
        )
    )


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__" if isinstance(function, FunctionType) else "__name__", None)
    return f"`{name}`" if name else f"an object of {type(function).__name__}"


def _checked(script: Any, call: Function) -> Function:
    """Returns the call of a script, unless this thread has a rule for one of its operations, which does not hold there.

    Raises:
        RuntimeError: an operation of the script is listed.
    """
    listed = {plain_name(function) for function, rule in RULES.items[-1].items() if isinstance(rule, Cast)}
    if found := sorted(listed & catching.operations(script)):
        raise RuntimeError(
            "`casts` does not reach into TorchScript: a listed function would run in the precision of its arguments. "
            f"Received: a scripted or traced function with {', '.join(found[:5])}. Run the Python function, for all "
            "scripts by PYTORCH_JIT=0, or leave these out of the lists."
        )
    return call


catching.SCRIPT_HANDLERS.append(_checked)


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
