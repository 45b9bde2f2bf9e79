"""The Keras adapter in the conformance table on each backend, in a process of its own."""

from collections.abc import Mapping

from tests.conformance.adapters import Difference
from tests.conformance.child import ChildAdapter

MODULE = "tests.conformance.keras_adapter"

# Not complex64: Keras cannot clip it.
TYPES = frozenset({"float16", "bfloat16", "float64"})

DIFFERS: Mapping[Difference, str] = {"infinite norm": "Keras clips by its own `global_clipnorm`"}

TENSORFLOW = ChildAdapter(MODULE, {"KERAS_BACKEND": "tensorflow"}, TYPES, DIFFERS)
TORCH = ChildAdapter(MODULE, {"KERAS_BACKEND": "torch"}, TYPES, DIFFERS)
# JAX makes float32 of float64 unless `jax_enable_x64` is set.
JAX = ChildAdapter(MODULE, {"KERAS_BACKEND": "jax"}, TYPES - {"float64"}, DIFFERS)
