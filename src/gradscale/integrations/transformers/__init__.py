"""Loss scaling inside the `Trainer` of Transformers, and of TRL: one call before `train`."""

from gradscale._extras import require

require(__name__, "accelerate", "transformers", extra="transformers")

from gradscale.integrations.transformers.install import install

__all__ = ["install"]
