"""`casts` and its decorators: which functions run in which precision, on top of autocast or without it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import cache, reduce, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradscale.torch.cast import HALF_DTYPES, cast, tensors_in
from gradscale.torch.casting.catching import RULES, Function, Patch, functions_by_name, plain_name, torch_aliases

__all__ = ["casts", "float_function", "half_function", "promote_function"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cast:
    """A rule that casts the floating-point arguments. Gradients have the dtypes that the arguments had."""

    to: str
    """`"half"`, `"float"` (float32), or `"promote"`: the widest dtype among the arguments."""
    in_torch: bool = False
    dtype: torch.dtype | None = None
    """The half dtype; None is autocast's own where autocast is enabled, and FP16 elsewhere."""

    def __call__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # `out` of a torch function is not cast: the result would be written to the copy.
        inputs = {key: value for key, value in kwargs.items() if not (self.in_torch and key == "out")}
        tensors = floating(args, inputs)
        if not tensors:
            return function(*args, **kwargs)
        device = autocast_device(tensors)
        castable = {tensor.dtype for tensor in tensors} - {torch.float64}  # which autocast leaves alone, too
        if self.to == "promote":
            dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        elif self.to == "float":
            dtype = torch.float32
        else:
            dtype = self.dtype or (torch.float16 if device is None else torch.get_autocast_dtype(device))
        args, inputs = cast((args, inputs), dtype, castable)
        # Autocast would cast the inputs of a torch function once more. A Python function keeps it, since autocast casts
        # the weights that the function uses beside its arguments, unless it is to run in float32 altogether.
        disabled = device if self.in_torch or self.to == "float" else None
        return without_autocast(disabled, function, args, {**kwargs, **inputs})


@dataclass(frozen=True, slots=True)
class Ban:
    """A rule that raises an error, with the reason and what to use instead, for arguments of an unsafe dtype."""

    reason: str
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    safe_under: tuple[str, ...] = ()
    """Device types whose autocast runs the function in float32, where that makes it safe."""

    def __call__(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for tensor in floating(args, kwargs):
            is_safe = tensor.device.type in self.safe_under and torch.is_autocast_enabled(tensor.device.type)
            if tensor.dtype in self.dtypes and not is_safe:
                raise RuntimeError(
                    f"`{function.__name__}` is unsafe in half precision. Received: a tensor of {tensor.dtype}. "
                    f"{self.reason} To allow it: `casts(allow=[...])`."
                )
        return function(*args, **kwargs)


ATANH = Ban("A value near 1 is rounded to 1, whose atanh is inf. Keep the value from before the `tanh`.")
ACOS = Ban("A cosine near 1 is rounded to 1: the angle is 0, and its gradient infinite. Use `atan2(sine, cosine)`.")

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
    torch.atanh: ATANH,
    torch.arctanh: ATANH,
    torch.erfinv: Ban("A value near 1 is rounded to 1, whose erfinv is inf. Keep the value from before the `erf`."),
    torch.acos: ACOS,
    torch.arccos: ACOS,
    # CUDA's autocast runs both (the first: its norm) in float32, by its documented list. The CPU's does not.
    functional.normalize: Ban(
        "Its `eps` of 1e-12 is 0 in FP16: a row of zeros becomes NaN, and one longer than 65504 becomes 0. "
        "Use `normalize(x.float(), ...)`.",
        (torch.float16,),
        ("cuda",),
    ),
    functional.cosine_similarity: Ban(
        "Its `eps` of 1e-8 is 0 in FP16: a row of zeros gives NaN, and one longer than 65504 gives 0. "
        "Use `cosine_similarity(x.float(), y.float(), ...)`.",
        (torch.float16,),
        ("cuda",),
    ),
}
"""The functions that `casts` does not run on half-precision tensors, unless they are allowed."""


@cache
def bans() -> dict[Function, Ban]:
    """Returns `BANNED` with all aliases of each function, in-place ones included."""
    named = {plain_name(function) + end: ban for function, ban in BANNED.items() for end in ("", "_")}
    return {alias: ban for name, ban in named.items() for alias in functions_by_name().get(name, ())}


class casts(TorchFunctionMode, ContextDecorator):
    """Runs the listed functions in the precision they are listed under, and rejects unsafe ones in half precision.

    >>> x = torch.full((4,), 300.0, dtype=torch.float16)
    >>> x.square()
    tensor([inf, inf, inf, inf], dtype=torch.float16)
    >>> with casts(float=[torch.square]):
    ...     x.square()
    tensor([90000., 90000., 90000., 90000.])

    Also a decorator. Floating-point tensors in the arguments are cast, in nested containers too; gradients have the
    dtypes that the arguments had. A function is the object that is called: one of torch's, with all its aliases; a
    Python function or method of any library, or of your own.

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
        RuntimeError: inside, an unsafe function gets half-precision tensors.
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
        self._patches: list[Patch] = []
        self._allowed = {alias for function in allow for alias in _caught("allow", function)[0]}
        reasons = banned or {}
        lists: dict[str, Iterable[Function]] = {"half": half, "float": float, "promote": promote, "banned": reasons}
        for parameter, function in ((name, each) for name in lists for each in lists[name]):
            aliases, patches = _caught(parameter, function)
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
            rule = Ban(reasons[function]) if parameter == "banned" else Cast(parameter, not patches, dtype)
            self._rules |= dict.fromkeys(aliases, rule)
            self._patches += patches

    def __enter__(self) -> "casts":
        outer = bans() | RULES.items[-1]
        # `allow` lifts bans, not casts of an outer context.
        lifted = {alias: None for alias in self._allowed if isinstance(outer.get(alias), Ban)}
        RULES.items.append(outer | lifted | self._rules)
        for patch in self._patches:
            patch.add_users(1)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for patch in self._patches:
            patch.add_users(-1)
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


def _caught(parameter: str, function: Any) -> tuple[frozenset[Function], list[Patch]]:
    """Returns the functions whose calls are those of a listed one, and the patch that a Python function needs."""
    name = plain_name(function)
    if aliases := torch_aliases(function):
        if parameter != "allow" and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            raise TypeError(
                f"`{parameter}` must not list functions that write to their argument: they would write to a copy. "
                f"Received: {_named(function)}. List the one that returns its result, and call that."
            )
        return aliases, []
    if isinstance(function, FunctionType) and (patch := Patch.of(function)).places:
        return frozenset([patch.function]), [patch]
    raise TypeError(
        f"`{parameter}` takes functions whose calls can be caught: torch's own, and Python functions and methods found "
        f"under their name in a module or class. Received: {_named(function)}. Name a method of the class, such as "
        "`LayerNorm.forward`, or call it from a function decorated with `half_function`, `float_function` or "
        "`promote_function`."
    )


def _named(function: Any) -> str:
    return f"`{getattr(function, '__name__', type(function).__name__)}`"


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
        if autocast_device(floating(args, kwargs)):
            return rule(function, args, kwargs)
        return function(*args, **kwargs)

    return decorated


def floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the floating-point tensors among arguments, and in nested containers of them."""
    return [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_floating_point()]


def autocast_device(tensors: Iterable[Tensor]) -> str | None:
    """Returns the device type of the first tensor for which autocast is enabled, or None."""
    devices = (tensor.device.type for tensor in tensors)
    return next((device for device in devices if torch.is_autocast_enabled(device)), None)


def without_autocast(device: str | None, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call with autocast disabled on a device type, if one is given."""
    if device is None:
        return function(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)
