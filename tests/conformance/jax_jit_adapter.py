"""The JAX adapter in the conformance table, with the whole step compiled."""

from tests.conformance.jax_adapter import JaxAdapter

ADAPTER = JaxAdapter(compiled=True)
