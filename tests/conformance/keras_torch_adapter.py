"""The Keras adapter in the conformance table, on torch, in a process of its own."""

from tests.conformance.child import ChildAdapter

# Not complex64: Keras cannot clip it.
TYPES = frozenset({"float16", "bfloat16", "float64"})

ADAPTER = ChildAdapter("tests.conformance.keras_adapter", {"KERAS_BACKEND": "torch"}, TYPES)
