"""Keras' `fit` with gradscale's LossScaleOptimizer, against `fit` with Keras' own, on every backend that is installed.

Claim:    with Keras' own rule (`Dynamic`), `fit` takes no longer than with Keras' class, to the noise of the run; with
          a policy that predicts (`Headroom`), at most 1.05 times as long.
Baseline: keras.optimizers.LossScaleOptimizer around the same Adam, in the same process, on a copy of the same model.
Machine:  printed with the results. Each backend runs in a process of its own, on one core but for TensorFlow.
Command:  python -m benchmarks.bench_keras_fit [--quick]
Caveats:  "Keras' own, again" is the baseline against itself. The goal of `Dynamic` is where its third quartile lies, or
          1 where that is less. One repeat is a `fit` of ten batches. TensorFlow runs graphs without XLA, JAX compiles,
          torch runs eagerly, as is usual for each. TensorFlow has all cores, and is given all batches of a `fit` at
          once: on one core it waits for its own threads, and a `fit` of either side takes once or twice as long by
          chance. FP16 on a CPU is emulated in part. No GPU was measured.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.alone import run_alone
from benchmarks.rows import Row, compared
from benchmarks.timing import timed
from benchmarks.turns import Side

BACKENDS = ("tensorflow", "jax", "torch")

OURS, PREDICTIVE, CONTROL = "Dynamic", "Headroom", "Keras' own, again"
BASELINE = "Keras' own"
PREDICTIVE_GOAL = 1.05

WIDTH, DEPTH, BATCH = 512, 4, 128


def makers() -> dict[str, Callable[[Any], Any]]:
    """Returns the ways to scale an optimizer, by name."""
    import keras

    from gradscale import Headroom
    from gradscale.keras import LossScaleOptimizer

    own: Any = keras.optimizers.LossScaleOptimizer
    return {
        BASELINE: own,
        CONTROL: own,
        OURS: LossScaleOptimizer,
        PREDICTIVE: partial(LossScaleOptimizer, policy=Headroom()),
    }


def side(scaled: Callable[[Any], Any], batches: int) -> Side:
    """Returns a side whose turn is a `fit`, which goes on from the one before.

    A `fit` that is not timed comes first: what the side before left in caches and allocators would weigh on this one.
    """
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu", dtype="mixed_float16") for _ in range(DEPTH)]
    model: Any = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1, dtype="float32")])
    backend = keras.config.backend()
    at_once = 1 if backend == "torch" else batches  # Keras cannot do more than one there
    optimizer = scaled(keras.optimizers.Adam(1e-4))
    model.compile(optimizer, loss="mse", jit_compile=backend == "jax", steps_per_execution=at_once)
    rows = np.random.default_rng(0).normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    run = partial(model.fit, rows, rows[:, :1], batch_size=BATCH, shuffle=False, verbose=0)
    run()  # compiles
    return Side(run, prepare=run)  # `fit` ends by reading the loss, so it has waited for the device


def backend_rows(backend: str, quick: bool) -> list[Row]:
    """Returns the rows of the backend that Keras runs on in this process."""
    batches = 5 if quick else 10
    made = {name: partial(side, scaled, batches) for name, scaled in makers().items()}
    seconds = timed(lambda: {name: make() for name, make in made.items()}, 4 if quick else 60, quick)
    what = f"fit, Keras on {backend}"
    control = compared(f"{CONTROL}: {what}", BASELINE, seconds[CONTROL], seconds[BASELINE])
    noise = max(1.0, control.quartiles[1]) if control.quartiles else 1.0
    return [
        compared(f"{OURS}: {what}", BASELINE, seconds[OURS], seconds[BASELINE], noise),
        compared(f"{PREDICTIVE}: {what}", BASELINE, seconds[PREDICTIVE], seconds[BASELINE], PREDICTIVE_GOAL),
        control,
    ]


def rows(quick: bool) -> list[Row]:
    """Returns the rows of all backends that are installed, each measured in a process of its own."""
    installed = [backend for backend in BACKENDS if find_spec("keras") and find_spec(backend)]
    return [row for backend in installed for row in _rows_of_a_process(backend, quick)]


def _rows_of_a_process(backend: str, quick: bool) -> list[Row]:
    env = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.bench_keras_fit", "--child", backend, *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [_as_row(values) for values in json.loads(done.stdout.splitlines()[-1])]


def _as_row(values: dict[str, Any]) -> Row:
    pairs: dict[str, Any] = {name: tuple(values[name]) for name in ("quartiles", "seconds")}
    return Row(**values | pairs)


def _child(backend: str, quick: bool) -> None:
    """Measures in this process, and prints the rows as JSON."""
    if backend != "tensorflow" and hasattr(os, "sched_setaffinity"):
        # The last core: the first serves interrupts. Threads that wait for each other are no part of the comparison.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps([asdict(row) for row in backend_rows(backend, quick)]))


if __name__ == "__main__":
    if "--child" in sys.argv:
        _child(sys.argv[sys.argv.index("--child") + 1], "--quick" in sys.argv)
    else:
        run_alone("Keras' fit with loss scaling", rows)
