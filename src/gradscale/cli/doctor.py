"""`gradscale doctor`: what is installed here, and which adapters load."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from rich.markup import escape

from gradscale import __version__
from gradscale.cli._console import console, table

STDERR = 2

BROKEN = 1
"""Exit code when an adapter does not load although its framework is installed."""

ADAPTERS = {
    "numpy": "gradscale.numpy",
    "torch": "gradscale.torch",
    "jax": "gradscale.jax",
    "keras": "gradscale.keras",
    "mxnet": "gradscale.mxnet",
}
"""The adapter of each framework."""

OTHERS = ("ml_dtypes", "typer", "rich", "optax", "tensorflow", "tensorflow-cpu", "scikit-learn", "matplotlib")


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one framework in this environment.

    Attributes:
        framework: its name.
        version: the version installed; None where it is not.
        adapter: whether gradscale's adapter loads, in a few words.
        broken: whether the adapter should have loaded and did not.
    """

    framework: str
    version: str | None
    adapter: str
    broken: bool = False


def doctor() -> None:
    """Show what is installed and which adapters load. Exits with 1 if one is broken."""
    screen = console()
    python = f"Python {platform.python_version()}, {sys.executable}"
    screen.print(escape(f"gradscale {__version__}\n{python}\n{platform.platform()}"), soft_wrap=True)
    with screen.status("loading the frameworks that are installed"), _stderr_dropped():
        findings = [examine(framework, adapter) for framework, adapter in ADAPTERS.items()]
    rows = table("framework", "version", "adapter", prose=2)
    for found in findings:
        rows.add_row(found.framework, found.version or "-", escape(found.adapter))
    screen.print(rows)
    others = [f"{name} {version}" for name in OTHERS if (version := installed(name))]
    screen.print(f"Also installed: {', '.join(others)}")
    screen.print(f"Devices: {escape(', '.join(devices()))}")
    if any(found.broken for found in findings):
        raise typer.Exit(BROKEN)


def examine(framework: str, adapter: str) -> Finding:
    """Returns what is known of a framework; imports the adapter, and so the framework, where both exist."""
    version = installed(framework)
    if not _exists(adapter):
        return Finding(framework, version, "not in this version of gradscale")
    if version is None:
        return Finding(framework, None, f'not installed; pip install "gradscale[{framework}]"')
    try:
        importlib.import_module(adapter)
    except Exception as error:  # whatever is wrong with an installation is reported here
        return Finding(framework, version, f"fails to load: {type(error).__name__}: {error}", broken=True)
    return Finding(framework, version, f"{adapter} loads")


def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package does not exist
        return False
