"""Measures the cost of a step: sides that take turns, and a count of the gradient memory each of them touches."""
