"""What a command is to work on, by name: a function of the user's own, a training that one returns, and a device."""

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class BadTarget(ValueError):
    """Raised when an argument does not name something that can be used."""


class Training(NamedTuple):
    """What the function that is named returns.

    Attributes:
        model: the module that is trained.
        batches: batches, of whatever type `loss_fn` takes.
        loss_fn: takes the model and a batch, runs the forward pass with its autocast, and returns the loss.
        optimizer: of the model's parameters, or None.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None


def device_of(name: str | None) -> str:
    """Returns the device to work on: by default the accelerator, where there is one."""
    # Asked first: `current_accelerator` checks that itself only from torch 2.7 on.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    known = ["cpu", *([accelerator.type] if accelerator else [])]
    if name is None:
        return known[-1]
    kind, _, index = name.partition(":")
    count = torch.accelerator.device_count() if kind != "cpu" else 1
    if kind not in known or (index and not (index.isdecimal() and int(index) < count)):
        raise BadTarget(
            f"`--device` must be one that torch can compute on here: {', '.join(known)}. Received: {name!r}."
        )
    return name


def load_function(option: str, path: str, others: Collection[str] = ()) -> Callable[..., Any]:
    """Returns the function that `module:function` names. Modules of the current folder are found, too.

    Args:
        option: the command-line option, for error messages.
        path: the value of the option.
        others: its other valid values.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name) or module_name.startswith("."):  # a relative import has no package here
        names = f"{', '.join(others)} or " if others else ""
        raise BadTarget(f"`{option}` must be {names}MODULE:FUNCTION, as in my_package.models:make. Received: {path!r}.")
    function: Any = _import(option, module_name)
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise BadTarget(f"`{option}` must name a function of {module_name}. Received: {path}, which is {found}.")
    return function


def load_training(option: str, path: str) -> Training:
    """Returns what the function `module:function` returns, or raises if that is no training."""
    made: Any = load_function(option, path)()
    # A model may be iterable, over its layers.
    given: list[Any] = list(made) if isinstance(made, Iterable) and not isinstance(made, nn.Module) else [made]
    is_training = (
        len(given) in (3, 4)
        and isinstance(given[0], nn.Module)
        and isinstance(given[1], Iterable)
        and callable(given[2])
        and isinstance(given[3] if len(given) == 4 else None, torch.optim.Optimizer | None)
    )
    if not is_training:
        raise BadTarget(
            "The function must return (model, batches, loss_fn) or (model, batches, loss_fn, optimizer), where "
            f"`loss_fn(model, batch)` returns the loss. Received: {', '.join(type(each).__name__ for each in given)} "
            f"from {path}."
        )
    return Training(*given)


def _import(option: str, name: str) -> Any:
    """Returns a module. Errors inside of it keep their traceback."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module, or a package that it is in, was not found. A missing import inside of it is raised as it is.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise BadTarget(
            f"`{option}` must name a module that Python finds, here or installed. Received: {name}. "
            "Run from the folder that holds it."
        ) from None
