"""See `mxnet`."""

from typing import Any

def __getattr__(name: str) -> Any: ...
