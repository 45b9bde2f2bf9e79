"""`fabric.save` and `fabric.load` with the scaler of the precision plugin, which Fabric leaves out."""

from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

from lightning.fabric import Fabric

KEY = "MixedPrecision"
"""Under which the scaler is saved: as in a checkpoint of `Trainer`."""


class CarriesScaler:
    """A precision plugin whose scaler `fabric.save` and `fabric.load` take along."""


@cache
def carry_scalers() -> None:
    """Makes every `Fabric` whose precision plugin is a `CarriesScaler` save and load its scaler; others are as before.

    Done once. Fabric gives its plugins no part in a checkpoint, and no way to reach it.
    """
    save, load = Fabric.save, Fabric.load

    @wraps(save)
    def save_with_scaler(self: Fabric, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        plugin = self.strategy.precision
        # Empty for BF16 and a scaler that is disabled: there is nothing to save, as in a checkpoint of `Trainer`.
        if isinstance(plugin, CarriesScaler) and not _holds(state, plugin) and (saved := plugin.state_dict()):
            state = state | {KEY: saved}
        save(self, path, state, *args, **kwargs)

    @wraps(load)
    def load_with_scaler(self: Fabric, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = load(self, path, state, *args, **kwargs)
        plugin = self.strategy.precision
        # Without a `state` nothing is restored, and all of the checkpoint is returned.
        if isinstance(plugin, CarriesScaler) and state and KEY in remainder:
            plugin.load_state_dict(remainder.pop(KEY))
        return remainder

    Fabric.save, Fabric.load = save_with_scaler, load_with_scaler


def _holds(state: Mapping[str, Any], plugin: Any) -> bool:
    """Returns whether the user saves the scaler already, or something else under its name."""
    return KEY in state or any(value is plugin or value is plugin.scaler for value in state.values())
