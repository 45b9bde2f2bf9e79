"""Runs pytest as on another CPU: without the vector instructions beyond the baseline: python -m tests.other_cpu [...]

numpy and torch choose kernels by what the CPU has, and those round sums differently. Tests must pass with any of them.
`NPY_DISABLE_CPU_FEATURES` gets all that numpy found beyond the baseline it was built for, and `ATEN_CPU_CAPABILITY` is
set to torch's kernels without vector instructions. Libraries that choose kernels of their own, such as XLA and oneDNN,
are left as they are.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

ASK_NUMPY = """
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
print(*(name for name in __cpu_dispatch__ if __cpu_features__.get(name)))
"""


def beyond_the_baseline() -> list[str]:
    """Returns the CPU features that numpy would use here and can do without, by its own names."""
    environment = {name: value for name, value in os.environ.items() if name != "NPY_DISABLE_CPU_FEATURES"}
    command = [sys.executable, "-c", ASK_NUMPY]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def variables(features: list[str]) -> Mapping[str, str]:
    """Returns the environment variables of the other CPU."""
    return {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": " ".join(features)}


if __name__ == "__main__":
    other = variables(beyond_the_baseline())
    print(*(f"{name}={value!r}" for name, value in other.items()), flush=True)
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]], {**os.environ, **other})
