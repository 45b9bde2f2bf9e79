"""`casts` and its decorators: which functions run in which precision, with autocast or without it."""

from gradscale.torch.casting.context import casts
from gradscale.torch.casting.decorators import float_function, half_function, promote_function

__all__ = ["casts", "float_function", "half_function", "promote_function"]
