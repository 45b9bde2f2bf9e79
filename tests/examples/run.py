"""Runs an example once, however many tests look at what it prints."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

OWN_PROCESS = ("keras_", "jax_many_devices", "accelerate_", "transformers_", "torch_rl_fp16")
"""How names of examples begin that need a process of their own, which has one Keras backend, one set of devices, one
state of Accelerate, and the folder of the examples on its path."""

RANKS = {"torch_ddp": 2, "torch_fsdp2": 2, "torch_fsdp2_tp": 4, "torch_pipeline": 2}
"""Examples that `torchrun` starts, and on how many ranks."""

RAY_SETTINGS = {"RAY_agent_register_timeout_ms": "120000"}
"""A busy machine takes longer to start Ray than the 15 seconds that it allows."""

TIMEOUT_S = 600
"""After which ranks that wait for each other are ended."""

KERAS_WARNINGS = ("error", "ignore:__array__ implementation doesn't accept:DeprecationWarning")
"""Keras 3.15 converts tensors in a way that numpy 2 frowns upon."""


@cache
def lines_printed(name: str) -> list[str]:
    """Returns what the example prints when it is run as a program.

    Args:
        name: of the file in `examples`, without its ending.
    """
    path = str(EXAMPLES / f"{name}.py")
    if name.startswith(OWN_PROCESS):
        return _lines_of_a_process(path)
    if name in RANKS:
        return _lines_of_ranks(path, RANKS[name])
    if name.startswith("ray_"):
        return _lines_of([path], os.environ | RAY_SETTINGS)
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue().splitlines()


def _lines_of_a_process(path: str) -> list[str]:
    """Returns what a program prints when it is run in a process of its own."""
    options = [option for warning in KERAS_WARNINGS for option in ("-W", warning)]
    return _lines_of([*options, path], {"KERAS_BACKEND": "torch"} | os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})


def _lines_of_ranks(path: str, ranks: int) -> list[str]:
    """Returns what all ranks of an example print. Warnings are errors in each of them."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), path]
    return _lines_of(launch, os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"})


def _lines_of(arguments: list[str], env: Mapping[str, str]) -> list[str]:
    """Returns what Python prints with these arguments. Raises if it fails."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-8000:]}")
    return done.stdout.splitlines()
