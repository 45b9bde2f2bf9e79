"""The trainers that gradscale works inside of: which versions, and which of its modules they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from gradscale.cli._requirements import Package, package_for


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
