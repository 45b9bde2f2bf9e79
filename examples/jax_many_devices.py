"""Four devices, data and tensor parallel under `shard_map`: one decision for all, and the norm of all shards."""

import os

# Four devices of one CPU, and more threads than devices: XLA's all-reduces block the thread they run on.
os.environ.update(XLA_FLAGS="--xla_force_host_platform_device_count=4", NPROC="16")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from gradscale.jax import Scaler, apply, value_and_grad

STEPS = 200

digits = load_digits()
pixels, labels = (digits.data / 16).astype(np.float32), digits.target

mesh = Mesh(np.reshape(jax.devices(), (2, -1)), ("data", "model"))
rng = np.random.default_rng(0)
params = {
    "hidden": rng.normal(0, 1 / 8, (64, 128)).astype(np.float32),
    "head": rng.normal(0, 1 / 12, (128, 10)).astype(np.float32),
    "bias": np.zeros(10, np.float32),
}
specs = {"hidden": P(None, "model"), "head": P("model"), "bias": P()}  # half of the hidden layer on each device

tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 5e-3, 20, STEPS))
opt_state, scaler = tx.init(params), Scaler()
opt_specs = optax.tree_utils.tree_map_params(
    tx, lambda _, spec: spec, opt_state, specs, transform_non_params=lambda _: P()
)


def loss_of(params, x, y):
    hidden, head, x = (leaf.astype(jnp.float16) for leaf in (params["hidden"], params["head"], x))
    partial = (jax.nn.gelu(x @ hidden) @ head).astype(jnp.float32)
    logits = jax.lax.psum(partial, "model") + params["bias"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return jax.lax.pmean(loss, "data")  # so that gradients are those of the mean over all rows


# An overflow on one device skips the step on all. Under plain `jit`, with arrays that `NamedSharding` spreads, the loss
# needs neither `psum` nor `pmean`, and the step is the same.
def step(scaler, params, opt_state, x, y):
    loss, grads, scaler, result = value_and_grad(loss_of, clip_norm=1.0)(scaler, params, x, y)
    params, opt_state = apply(tx, grads, opt_state, params, result)
    return scaler, params, opt_state, loss, result


state_specs = (P(), specs, opt_specs)
train = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(*state_specs, P("data"), P("data")), out_specs=(*state_specs, P(), P()))
)

# On the mesh from the first step on, or it is compiled twice. With several processes, JAX compares their values here.
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs, is_leaf=lambda node: isinstance(node, P))
scaler, params, opt_state = (jax.device_put(*pair) for pair in zip((scaler, params, opt_state), shardings, strict=True))

losses = []
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=64)
    scaler, params, opt_state, loss, result = train(scaler, params, opt_state, pixels[batch], labels[batch])
    losses.append(loss)

scaler.check(result)  # raises if the run is stuck, or if devices have different scales
metrics = scaler.metrics(result)
print(f"{len(jax.devices())} devices, loss {losses[0]:.3f} -> {jnp.stack(losses[-20:]).mean():.3f}", end=", ")
print(f"skipped {metrics['skipped']} of {STEPS} steps, scale {metrics['scale']:g}")
