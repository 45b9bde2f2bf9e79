"""Reads what `record.py` has written, for the pictures and the tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.histogram import EXPONENTS, ExponentHistogram

HERE = Path(__file__).parent


def recorded_histograms() -> dict[str, ExponentHistogram]:
    """Returns the recorded histograms by their titles."""
    return {each["title"]: _histogram(each) for each in load("histograms")["histograms"]}


def load(name: str) -> dict[str, Any]:
    """Returns the content of a recorded file."""
    return json.loads((HERE / f"{name}.json").read_text())


def _histogram(saved: dict[str, Any]) -> ExponentHistogram:
    counts = np.zeros(EXPONENTS.size, np.int64)
    first = saved["first_exponent"] - int(EXPONENTS[0])
    counts[first : first + len(saved["counts"])] = saved["counts"]
    return ExponentHistogram(counts, zeros=np.int64(saved["zeros"]))
