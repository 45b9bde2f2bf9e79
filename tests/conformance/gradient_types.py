"""Types of gradients by name, and of the parameters they belong to."""

import ml_dtypes
import numpy as np
import pytest
from tests.conformance.adapters import Adapter

NUMPY_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "complex64": np.dtype(np.complex64),
}


def parameter_type(dtype: str) -> str:
    """Returns the type of the parameters whose gradients are of type `dtype`: float32 at least."""
    return dtype if dtype in ("float64", "complex64") else "float32"


def skip_unless_taken(adapter: Adapter, dtype: str) -> None:
    """Skips a case with gradients of a type that the adapter does not take."""
    if dtype not in adapter.dtypes | {"float32"}:
        pytest.skip(f"takes no {dtype} gradients")
