"""The Keras adapter in the conformance table, on JAX, in a process of its own."""

from tests.conformance.child import ChildAdapter

# Not float64, of which JAX makes float32 unless it is told not to, and not complex64, which Keras cannot clip.
TYPES = frozenset({"float16", "bfloat16"})

ADAPTER = ChildAdapter("tests.conformance.keras_adapter", {"KERAS_BACKEND": "jax"}, TYPES)
