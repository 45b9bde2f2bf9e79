"""Run by `make dist` in a clean environment, on the installed wheel: python -I smoke.py

Raises if something is not as a new user should find it. The environment has the core's dependencies and no more.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"smoke test: {what}")


def main() -> None:
    import numpy as np

    import gradscale
    from gradscale.numpy import LossScaler

    installed = Path(gradscale.__file__)
    check(installed.is_relative_to(sys.prefix), f"gradscale is imported from {installed}, not from {sys.prefix}")
    check(importlib.metadata.version("gradscale") == gradscale.__version__, "the versions differ")
    for absent in ("torch", "jax", "keras", "mxnet", "typer", "rich"):
        check(importlib.util.find_spec(absent) is None, f"the core brought {absent}")

    scaler = LossScaler(gradscale.Dynamic(init_scale=1024.0))
    overflow = scaler.step({"weight": np.array([np.inf, 1], np.float16)})
    check(not overflow.applied and overflow.next_scale == 512.0, f"an overflow gave {overflow}")
    result = scaler.step({"weight": np.array([512, -256], np.float16)})
    check(result.applied and result.grads["weight"].tolist() == [1.0, -0.5], f"finite gradients gave {result}")

    command = Path(sys.executable).with_name("gradscale")
    ended = subprocess.run([str(command), "--version"], capture_output=True, text=True)
    check(ended.returncode != 0, "the command line ran without its extra")
    check("gradscale[cli]" in ended.stderr, f"without its extra the command line said: {ended.stderr!r}")
    check("Traceback" not in ended.stderr, f"without its extra the command line failed: {ended.stderr!r}")
    print(f"smoke test: gradscale {gradscale.__version__} works on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
