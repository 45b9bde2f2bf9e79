"""Measuring what a step costs: sides that take turns, and a count of the gradient memory each of them touches."""
