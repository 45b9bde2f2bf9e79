"""The targets of a benchmark by name: shapes, an optimizer and a device."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer
Shapes = list[tuple[int, ...]]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""The keywords by which torch's optimizers choose the kernels of their update."""


class BadTarget(ValueError):
    """Raised when an argument does not name something that can be measured."""


def shapes_of(factory: str) -> Shapes:
    """Returns the shapes of the trained parameters of a model.

    Args:
        factory: `module:function`; the function takes no arguments, and returns a module or an iterable of parameters.
    """
    made = load_function("--model", factory)()
    parameters: Any = made.parameters() if isinstance(made, nn.Module) else made
    # A tensor is iterable too, over its rows.
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    given: list[Any] = list(parameters) if several else [parameters]
    if unknown := [type(item).__name__ for item in given if not isinstance(item, Tensor)]:
        raise BadTarget(
            "The function of `--model` must return a torch.nn.Module or an iterable of parameters. "
            f"Received: {unknown[0]} from {factory}."
        )
    trained = {id(parameter): tuple(parameter.shape) for parameter in given if parameter.requires_grad}
    if not any(map(math.prod, trained.values())):
        raise BadTarget(f"The model must have parameters that require gradients. Received: none from {factory}.")
    return list(trained.values())


def made_up_shapes(parameters: int, tensors: int) -> Shapes:
    """Returns the shapes of `tensors` flat tensors, as nearly equal as can be, that hold `parameters` in all.

    >>> made_up_shapes(10, 3)
    [(4,), (3,), (3,)]
    """
    if not 1 <= tensors <= parameters:
        raise BadTarget(
            "`--tensors` must lie between 1 and the number of parameters, so that none is empty. "
            f"Received: {tensors} tensors for {parameters} parameters."
        )
    size, rest = divmod(parameters, tensors)
    return [(size + (index < rest),) for index in range(tensors)]


def optimizer_of(
    name: str, implementation: str | None, device: str = "cpu"
) -> tuple[str, Callable[[list[Tensor]], Optimizer]]:
    """Returns the name of an optimizer in tables, and a function that makes it.

    Args:
        name: one of `OPTIMIZERS`, or the `module:function` of one that takes parameters.
        implementation: one of `IMPLEMENTATIONS`, for the first; by default the fused one.
        device: device of the parameters.
    """
    if name not in OPTIMIZERS:
        if implementation is not None:
            raise BadTarget(
                f"`--implementation` is for {', '.join(OPTIMIZERS)}: a function chooses its own. "
                f"Received: {implementation} with --optimizer {name}. Leave it out."
            )
        return name, partial(_make_own, name, load_function("--optimizer", name, others=OPTIMIZERS))
    implementation = "fused" if implementation is None else implementation
    if implementation not in IMPLEMENTATIONS:
        raise BadTarget(
            f"`--implementation` must be one of {', '.join(IMPLEMENTATIONS)}. Received: {implementation!r}."
        )
    make = partial(OPTIMIZERS[name], lr=1e-3, **IMPLEMENTATIONS[implementation])
    _check_kernels(f"{name} {implementation}", make, device)
    return f"{name} {implementation}", make


def _check_kernels(called: str, make: Callable[[list[Tensor]], Optimizer], device: str) -> None:
    """Raises if torch has no such optimizer for a device, which it reports only at the first step."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        make([parameter]).step()
    except RuntimeError as error:
        raise BadTarget(
            f"`--implementation` must be one that torch has for the optimizer on {device}. Received: {called}: {error}"
        ) from error


def _make_own(path: str, make: Callable[..., Any], parameters: list[Tensor]) -> Optimizer:
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise BadTarget(
            "The function of `--optimizer` must return a torch.optim.Optimizer. "
            f"Received: {type(made).__name__} from {path}."
        )
    return made


def device_of(name: str | None) -> str:
    """Returns the device to measure on: by default the accelerator, where there is one."""
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


def use_threads(threads: int | None) -> None:
    """Sets how many CPU threads torch uses, if that is given."""
    if threads is not None:
        torch.set_num_threads(threads)


def load_function(option: str, path: str, others: Collection[str] = ()) -> Callable[..., Any]:
    """Returns the function that `module:function` names. Modules of the current folder are found, too.

    Args:
        option: the command-line option, for error messages.
        path: the value of the option.
        others: its other valid values.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        names = f"{', '.join(others)} or " if others else ""
        raise BadTarget(f"`{option}` must be {names}MODULE:FUNCTION, as in my_package.models:make. Received: {path!r}.")
    function: Any = _import(option, module_name)
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise BadTarget(f"`{option}` must name a function of {module_name}. Received: {path}, which is {found}.")
    return function


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
