"""One of two processes that train together: run as a program by `test_processes.py`, with its number, a port, a folder.

Each has two devices. At the end it prints what it saw, as JSON.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.jax.ranks.layouts import Options, compiled, mesh_of, spread_over, start
from tests.jax.ranks.model import batches
from tests.jax.ranks.training import CASES, placed, whole

from gradscale import Dynamic
from gradscale.jax import ScaleDesync, Scaler, apply, value_and_grad

RUNS = {"shard_map, both": Options(), "jit, fsdp": Options(clip_norm=0.5)}
"""Cases that are trained in both processes, and how."""

STEPS = 10

SAVED_AFTER = 6
"""Steps of the run that is saved. The tests continue it in one process."""

SPIKED_STEPS = 5


def report(ended: Any) -> Any:
    """Returns the end of a run as JSON takes it: all bits of the state, and the results."""
    state, results = ended
    return {
        "state": [leaf.tobytes().hex() for leaf in jax.tree.leaves(state)],
        "results": [[number.item() for number in result] for result in results],
    }


def save(folder: Path, number: int) -> None:
    """Trains parameters that are sharded over both processes, and saves: the scaler by pickle, JSON and orbax."""
    options = Options()
    mesh = mesh_of("fsdp")
    shardings, rows = spread_over(mesh, "fsdp", options)
    step, state = compiled(options), placed(start(options), shardings)
    result: Any = None
    for batch in batches(SAVED_AFTER):
        *state, result = step(*state, placed(batch, rows))
    weights, opt_state, scaler = state
    if number == 0:  # reading a result or a scaler takes no communication
        names = [culprit.name for culprit in result.culprits()]
        (folder / "read.json").write_text(json.dumps([result.status(), names, scaler.to_dict()]))
        scaler.check(result)
    (folder / f"scaler{number}.json").write_text(json.dumps(scaler.to_dict()))
    (folder / f"scaler{number}.pickle").write_bytes(pickle.dumps(scaler))
    (folder / f"rest{number}.pickle").write_bytes(pickle.dumps(whole((weights, opt_state))))
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        return
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", scaler)


def desync(number: int, *, check_vma: bool) -> str:
    """Returns the error of a step in which only process 1 has loaded a scaler."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mine = Scaler(Dynamic(init_scale=2.0 ** (10 + number)))

    def local(scaler: Scaler, x: Any) -> Any:
        def loss(weight: Any) -> Any:
            own = jnp.sum(weight * x)
            return jax.lax.pmean(own, "data") if check_vma else own

        return value_and_grad(loss, mean_axes=() if check_vma else "data")(scaler, jnp.ones(2))[3]

    specs = (P(), P("data"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma))
    result = step(mine, placed(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("data"))))
    try:
        return result.status()
    except ScaleDesync as error:
        return str(error)


def put(number: int) -> str:
    """Returns the error that JAX itself raises where processes put different scalers on their devices."""
    mine = Scaler(Dynamic(init_scale=2.0 ** (10 + number)))
    try:
        return repr(jax.device_put(mine, NamedSharding(mesh_of("data"), P())))
    except AssertionError as error:
        return str(error)


def retried(number: int) -> dict[str, Any]:
    """Returns what this process saw. In step 2 the data of process 1 alone makes a gradient that is inf."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, same = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tx = optax.adam(0.05)

    def cost(weight: Any, x: Any, spike: Any) -> Any:
        return jax.lax.pmean(jnp.mean(jnp.square(x @ weight - 1.0)) + jnp.sum(weight[:1] * spike), "data")

    def local(weight: Any, opt_state: Any, scaler: Scaler, x: Any, spike: Any) -> Any:
        _, grads, scaler, result = value_and_grad(cost, retries=40)(scaler, weight, x, spike[0])
        return *apply(tx, grads, opt_state, weight, result), scaler, result.applied

    specs = (P(), P(), P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))
    start = jax.jit(
        lambda: (jnp.zeros(3), tx.init(jnp.zeros(3)), Scaler(Dynamic(init_scale=2.0**100))), out_shardings=same
    )
    weight, opt_state, scaler = start()
    seen = []
    for count in range(SPIKED_STEPS):
        x = np.random.default_rng([count, number]).normal(size=(4, 3)).astype(np.float32)
        spike = np.array([2.0**30 if number == 1 and count == 2 else 0.0, 0.0], np.float32)
        data = [jax.make_array_from_process_local_data(rows, local_data) for local_data in (x, spike)]
        weight, opt_state, scaler, applied = step(weight, opt_state, scaler, *data)
        seen.append((bool(applied), float(scaler.loss_scale)))
    return {"seen": seen, "weight": np.asarray(weight).tolist(), "skipped": int(scaler.state.skipped)}


def main(number: int, port: int, folder: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    runs = {case: report(CASES[case](options, batches(STEPS))) for case, options in RUNS.items()}
    save(folder, number)
    parted = [desync(number, check_vma=True), desync(number, check_vma=False), put(number)]
    print(json.dumps({"runs": runs, "retried": retried(number), "parted": parted}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
