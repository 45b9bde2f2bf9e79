"""`gradscale doctor`: what is installed here and which modules load; a test of a device; a few steps of a training."""

import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gradscale import __version__
from gradscale._extras import MissingExtra, how_to_install, require
from gradscale.cli._console import FAILURE, console, counted, fail, number, table, usage_errors
from gradscale.cli._requirements import CORE, TRAINERS, Package, installed, package_of, packages_by_extra
from gradscale.peers.specs import parse_policy
from gradscale.record import plain

if TYPE_CHECKING:
    from gradscale.checkup.training import Checkup

STDERR = 2

ADAPTERS = {
    CORE: "gradscale.numpy",
    "torch": "gradscale.torch",
    "jax": "gradscale.jax",
    "keras": "gradscale.keras",
    "mxnet": "gradscale.mxnet",
}
"""The adapter that needs each extra."""

OTHERS = ("tensorflow", "tensorflow-cpu", "flax", "jmp")
"""What gradscale works with and does not install."""

MARKS = {True: "ok", False: "FAILED", None: "-"}
"""The result of a test of a device."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one extra, or of one trainer, in this environment.

    Attributes:
        extra: its name.
        packages: what it installs, with versions.
        status: whether it can be used, in a few words.
        broken: whether it is installed and cannot be used.
    """

    extra: str
    packages: Sequence[Package]
    status: str
    broken: bool = False


def doctor(
    training: Annotated[
        str | None,
        typer.Argument(
            help="Run a few steps of this training and say what is wrong. The function returns (model, batches, "
            "loss_fn) or these and an optimizer, and loss_fn(model, batch) returns the loss.",
            show_default=False,
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Test this device instead: cpu, cuda, mps, xpu, npu.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the training.")] = 20,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Policy of the training; `gradscale policies` lists the names.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is installed and which adapters load, test a device, or examine a training.

    Exits with 1 if an adapter is broken or too old, a test fails, or the training needs attention.
    """
    if training is not None and device is not None:
        fail("Give MODULE:FUNCTION or --device, not both: the function places its model itself.")
    if training is not None:
        examine_training(training, steps, policy, as_json=as_json)
    elif device is not None:
        examine_device(device, as_json=as_json)
    else:
        examine_installation(as_json=as_json)


def examine_installation(*, as_json: bool) -> None:
    """Prints what is installed and which adapters load. Exits with 1 if one is broken or too old."""
    screen = console()
    with screen.status("loading the frameworks that are installed"), _stderr_dropped():
        with suppress(ImportError, OSError):
            __import__("triton")  # loaded after TensorFlow, it ends the process
        extras = packages_by_extra() or {extra: [] for extra in ADAPTERS}
        frameworks = [examine(name, extras[name], ADAPTERS.get(name)) for name in extras if name not in TRAINERS]
        trainers = [examine_trainer(package_of(name, extras)) for name in TRAINERS]
    findings = [*frameworks, *trainers]
    others = {name: version for name in OTHERS if (version := installed(name))}
    if as_json:
        listed = {"extras": list(map(asdict, frameworks)), "trainers": list(map(asdict, trainers))}
        print(json.dumps({**_about(), **listed, "others": others, "devices": devices()}))
    else:
        screen.print(
            escape("gradscale {gradscale}\nPython {python}, {executable}\n{platform}".format(**_about())),
            soft_wrap=True,
        )
        _show(frameworks, trainers, others)
    if any(found.broken for found in findings):
        raise typer.Exit(FAILURE)


def _about() -> dict[str, str]:
    return {
        "gradscale": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def _show(frameworks: Sequence[Finding], trainers: Sequence[Finding], others: dict[str, str]) -> None:
    screen, rows = console(), table("extra", "packages", "status", prose=2)
    for found in frameworks:
        shown = "\n".join(f"{package.name} {package.version or '-'}" for package in found.packages)
        rows.add_row(found.extra, escape(shown), escape(found.status))
    screen.print(rows)
    rows = table("trainer", "version", "supported", "status", prose=3)
    for found in trainers:
        (package,) = found.packages
        rows.add_row(found.extra, package.version or "-", package.needs, escape(found.status))
    screen.print(rows)
    if others:
        screen.print(f"Also installed: {', '.join(f'{name} {version}' for name, version in others.items())}")
    screen.print(f"Devices: {escape(', '.join(devices()))}")


def examine(extra: str, packages: Sequence[Package], adapter: str | None = None) -> Finding:
    """Returns the state of an extra; imports its adapter, and so the framework, where all packages are installed."""
    run = how_to_install(extra)
    missing = [package.name for package in packages if package.version is None]
    if missing and all(package.shared or package.version is None for package in packages):
        return Finding(extra, packages, f"not installed; {run}")
    if missing:
        return Finding(extra, packages, f"incomplete, without {', '.join(missing)}; {run}")
    if outside := [package for package in packages if not package.supported]:
        versions = ", ".join(f"{one.name} {one.version} is not {one.needs}" for one in outside)
        return Finding(extra, packages, f"not supported: {versions}; {run}", broken=True)
    return Finding(extra, packages, "installed") if adapter is None else _loaded(extra, packages, adapter)


def examine_trainer(package: Package) -> Finding:
    """Returns the state of a trainer; imports the module that it needs, and so the trainer, where it is installed."""
    name, trainer = package.name, TRAINERS[package.name]
    if package.version is None:
        return Finding(name, [package], "not installed")
    if not package.supported:
        # Broken only where an extra of gradscale asks for other versions. The rest is what a user chose to install.
        untested = f"not {'tested' if trainer.tested else 'supported'}: {name} {package.version} is not {package.needs}"
        return Finding(name, [package], untested, broken=trainer.tested is None)
    if trainer.module is None:
        return Finding(name, [package], trainer.instead)
    return _loaded(name, [package], trainer.module)


def _loaded(name: str, packages: Sequence[Package], module: str) -> Finding:
    """Returns whether a module of gradscale loads."""
    try:
        importlib.import_module(module)
    except MissingExtra as error:  # such as a backend of Keras
        return Finding(name, packages, f"incomplete: {error}")
    except Exception as error:  # whatever is wrong with an installation is reported here
        return Finding(name, packages, f"fails to load: {type(error).__name__}: {error}", broken=True)
    return Finding(name, packages, f"{module} loads")


def devices() -> list[str]:
    """Returns what the frameworks loaded so far can compute on."""
    probes: dict[str, Callable[[Any], list[str]]] = {"torch": _torch_devices, "jax": _jax_devices}
    found = ["CPU"]
    for framework, probe in probes.items():
        if framework in sys.modules:
            try:
                found += probe(sys.modules[framework])
            except Exception as error:  # a driver that does not start is a finding, not a crash
                found.append(f"{framework} fails to list its devices: {error}")
    return found


@contextmanager
def _stderr_dropped() -> Generator[None]:
    """Discards what is written to the error stream, by compiled code too: TensorFlow logs there when it is loaded."""
    # By file descriptor: replacing `sys.stderr` would not affect compiled code.
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
    try:
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


def _torch_devices(torch: Any) -> list[str]:
    names = [f"{torch.cuda.get_device_name(i)} (torch cuda:{i})" for i in range(torch.cuda.device_count())]
    return names + (["Apple GPU (torch mps)"] if torch.backends.mps.is_available() else [])


def _jax_devices(jax: Any) -> list[str]:
    return [f"{device.device_kind} (jax {device})" for device in jax.devices() if device.platform != "cpu"]


def examine_device(device: str, *, as_json: bool) -> None:
    """Tests a device and prints a row for each test. Exits with 1 if one fails."""
    with usage_errors():
        require("`gradscale doctor --device`", "torch", extra="torch")
        from gradscale.checkup.targets import device_of

        chosen = device_of(device)
    import torch

    from gradscale.checkup.device import check_device

    screen = console()
    with screen.status(f"testing {chosen}"):
        found = check_device(chosen)
    if as_json:
        about = {"gradscale": __version__, "torch": torch.__version__, "device": chosen, "name": _name(chosen)}
        print(json.dumps({**about, "tests": [asdict(each) for each in found]}))
    else:
        screen.print(escape(f"gradscale {__version__}, torch {torch.__version__}, {platform.platform()}"))
        rows = table(_name(chosen), "result", "detail", prose=2)
        for each in found:
            rows.add_row(escape(each.name), MARKS[each.passed], escape(each.detail))
        screen.print(rows)
    if any(each.passed is False for each in found):
        raise typer.Exit(FAILURE)


def _name(device: str) -> str:
    import torch

    kind = torch.device(device).type
    names = getattr(getattr(torch, kind, None), "get_device_name", None)
    return f"{names(device)} ({device})" if names is not None else device


def examine_training(path: str, steps: int, policy: str, *, as_json: bool) -> None:
    """Runs steps of what the function returns and prints a diagnosis. Exits with 1 if something must be done."""
    with usage_errors():
        require("`gradscale doctor MODULE:FUNCTION`", "torch", extra="torch")
        rule = parse_policy(policy)
    from gradscale.checkup.targets import BadTarget, load_training
    from gradscale.checkup.training import check_training

    try:
        found = check_training(load_training("doctor", path), steps, rule)
    except BadTarget as error:  # no other: an error in the user's functions keeps its traceback
        fail(str(error))
    if as_json:
        shown = asdict(found)
        if probe := shown.pop("report"):
            del probe["frames"]
        print(json.dumps(plain({"healthy": found.healthy, **shown, "probe": probe})))
    else:
        _show_training(found)
    if not found.healthy:
        raise typer.Exit(FAILURE)


def _show_training(found: "Checkup") -> None:
    screen = console()
    screen.print(
        f"{counted(len(found.losses), 'step')}, {len(found.skipped)} skipped; "
        f"loss {found.losses[0]:.4g} to {found.losses[-1]:.4g}; scale {number(found.scales[-1])}"
    )
    for step, why in list(found.skipped.items())[:3]:
        screen.print(f"  step {step}: {escape(why)}")
    for warned in found.warned:
        screen.print(f"[bold]Warning[/bold]: {escape(warned)}", soft_wrap=True)
    screen.print(f"[bold]Health[/bold]: {escape(str(found.health))}")
    if found.report is not None:
        screen.print(f"[bold]Probe of step {found.probed}[/bold]: {escape(str(found.report))}", soft_wrap=True)
