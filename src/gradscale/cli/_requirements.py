"""Which versions gradscale works with: of the packages that its metadata names, and of trainers around it."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.requirements import Requirement

CORE = "core"
"""Stands for the packages that are always installed."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that gradscale or one of its extras needs.

    Attributes:
        name: its name for pip.
        needs: the versions that are supported, as in `>=2.13`.
        version: the version installed; None where it is not.
        supported: whether that version is within `needs`.
        shared: whether the core, or an extra that this one includes, installs it as well.
    """

    name: str
    needs: str
    version: str | None
    supported: bool
    shared: bool = False


def packages_by_extra() -> dict[str, list[Package]]:
    """Returns the packages of the core and of each extra; nothing where gradscale runs without being installed."""
    try:
        metadata = importlib.metadata.metadata("gradscale")
    except importlib.metadata.PackageNotFoundError:
        return {}
    listed = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    return {extra: _packages(listed, extra) for extra in (CORE, *(metadata.get_all("Provides-Extra") or []))}


def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(listed: list[Requirement], extra: str) -> list[Package]:
    """Returns the packages of one extra; those of an extra that it includes come first."""
    core = {requirement.name for requirement in listed if _belongs(requirement, CORE)}
    found: list[Package] = []
    for requirement in listed:
        if not _belongs(requirement, extra):
            continue
        if requirement.name == "gradscale":
            included = [package for name in requirement.extras for package in _packages(listed, name)]
            found[:0] = [replace(package, shared=True) for package in included]
        else:
            found.append(package_for(requirement, shared=requirement.name in core))
    return found


def package_for(requirement: Requirement, shared: bool = False) -> Package:
    """Returns the package that a requirement names, as it is installed here."""
    version = installed(requirement.name)
    # A version such as 2.14.0a0+git is accepted where 2.13 is: a nightly is what someone chose.
    supported = version is not None and requirement.specifier.contains(version, prereleases=True)
    return Package(requirement.name, str(requirement.specifier), version, supported, shared)


def _belongs(requirement: Requirement, extra: str) -> bool:
    """Returns whether a requirement is one of `extra`, and not of the core."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return extra == CORE
    return extra != CORE and marker.evaluate({"extra": extra})


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that a user may have installed.

    Attributes:
        module: what of gradscale is used with it; None where its own scaler cannot be replaced.
        tested: versions that the tests run with, where no extra of gradscale states them.
        instead: what there is without a module.
    """

    module: str | None
    tested: str | None = None
    instead: str = ""


TRAINERS = {
    "lightning": Trainer("gradscale.integrations.lightning"),
    "accelerate": Trainer("gradscale.integrations.accelerate"),
    "transformers": Trainer("gradscale.integrations.transformers"),
    "trl": Trainer("gradscale.integrations.transformers", tested=">=1.0"),
    "ray": Trainer("gradscale.torch", tested=">=2.60"),
    "deepspeed": Trainer(None, tested=">=0.19", instead='its engine has its own scaler: preset("deepspeed")'),
}
"""By the name of the package. The first three have an extra of that name, which states the versions."""


def package_of(name: str, extras: Mapping[str, Sequence[Package]]) -> Package:
    """Returns the package of a trainer, with the versions that its extra states, or else those that are tested."""
    stated = (package for package in extras.get(name, ()) if package.name == name)
    return next(stated, None) or package_for(Requirement(f"{name}{TRAINERS[name].tested or ''}"))
