"""Arithmetic on gradients in one framework's arrays, for the adapters that share the framework."""
