"""MXNet as far as the type checker needs to know it: it has no types, and is not installed where the checker runs."""

from typing import Any

def __getattr__(name: str) -> Any: ...
