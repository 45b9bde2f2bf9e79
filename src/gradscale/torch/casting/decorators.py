"""Decorators for the user's own functions that run in a certain precision under autocast."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from gradscale.torch.casting.rules import Cast, autocast_devices, floating

P = ParamSpec("P")
R = TypeVar("R")


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
    return _decorated(function, Cast("half"))


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
    return _decorated(function, Cast("float"))


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
    return _decorated(function, Cast("promote"))


def _decorated(function: Callable[P, R], rule: Cast) -> Callable[P, R]:
    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> R:
        if autocast_devices(floating(args, kwargs)):
            return rule.run(function, args, kwargs, op=False)
        return function(*args, **kwargs)

    return decorated
