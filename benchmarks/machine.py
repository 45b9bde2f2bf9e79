"""What the benchmarks ran on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("gradscale", "torch", "jax", "numpy")

THREADS = 2
"""CPU threads that torch gets, on every machine."""


def describe() -> dict[str, str]:
    """Returns the processor, the system, its load, and the versions that matter."""
    facts = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(THREADS),
        "system": f"{platform.system()} {platform.machine()}",
        "load at the start": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "python": platform.python_version(),
    }
    return facts | {package: _version(package) for package in PACKAGES}


def summary(facts: dict[str, str]) -> str:
    """Returns the facts as one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _processor() -> str:
    """Returns the model of the processor, which Python itself does not know on Linux."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
