"""Loss scaling inside Accelerate: one call before `prepare`."""

from gradscale._extras import require

require(__name__, "accelerate", extra="accelerate")

from gradscale.integrations.accelerate.install import install

__all__ = ["install"]
