"""One of two processes that train together: run as a program by `test_processes.py`, with its number and a port."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradscale import Dynamic
from gradscale.jax import Scaler, apply, value_and_grad

STEPS = 5


def cost(weight: Any, x: Any, spike: Any) -> Any:
    return jnp.mean(jnp.square(x @ weight - 1.0)) + jnp.sum(weight[:1] * spike)


def train(number: int, retries: int) -> dict[str, Any]:
    """Returns what this process saw. In step 2 the data of process 1 alone makes a gradient that is inf."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, same = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tx = optax.adam(0.05)
    gradient = value_and_grad(lambda *args: jax.lax.pmean(cost(*args), "data"), retries=retries)

    def local(weight: Any, opt_state: Any, scaler: Scaler, x: Any, spike: Any) -> Any:
        loss, grads, scaler, result = gradient(scaler, weight, x, spike[0])
        return *apply(tx, grads, opt_state, weight, result), scaler, loss, result.applied

    specs = (P(), P(), P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))
    start = jax.jit(
        lambda: (jnp.zeros(3), tx.init(jnp.zeros(3)), Scaler(Dynamic(init_scale=2.0**100))), out_shardings=same
    )
    weight, opt_state, scaler = start()
    seen = []
    for count in range(STEPS):
        x = np.random.default_rng([count, number]).normal(size=(4, 3)).astype(np.float32)
        spike = np.array([2.0**30 if number == 1 and count == 2 else 0.0], np.float32)
        data = [jax.make_array_from_process_local_data(rows, local_data) for local_data in (x, spike)]
        weight, opt_state, scaler, _, applied = step(weight, opt_state, scaler, *data)
        seen.append((bool(applied), float(scaler.loss_scale)))
    return {"seen": seen, "weight": np.asarray(weight).tolist(), "skipped": int(scaler.state.skipped)}


def main(number: int, port: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    print(json.dumps({"plain": train(number, 0), "retried": train(number, 40)}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
