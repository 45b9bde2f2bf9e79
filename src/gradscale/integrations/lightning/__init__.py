"""Loss scaling inside Lightning: a precision plugin for `Trainer`, and one for `Fabric`."""

from gradscale._extras import require

require(__name__, "torch", "lightning", extra="lightning")

from gradscale.integrations.lightning.fabric import FabricMixedPrecision
from gradscale.integrations.lightning.trainer import MixedPrecision

__all__ = ["FabricMixedPrecision", "MixedPrecision"]
