"""A compiled JAX training step with loss scaling, against flax, jmp and no scaling at all.

Claim:    with `gradscale.jax.value_and_grad` and `apply`, a step takes no longer than with flax' `DynamicScale` or jmp;
          at most 0.90 of flax' when gradients are clipped; at most 1.02 of a step with no scaling where the model takes
          nearly all the time; and no longer than a step with no scaling when both clip.
Baseline: "no scaling": jax.value_and_grad, optax.clip_by_global_norm where it clips, Adam. "flax": DynamicScale, then
          the same, then `where` over parameters and optimizer state. "jmp": DynamicLossScale, all_finite, select_tree.
Machine:  printed with the results; XLA takes as many threads as there are cores.
Command:  python -m benchmarks.bench_jax_step [--quick]
Caveats:  "no scaling, again" is the baseline against itself: how far it is from 1 is the noise, and a goal missed by
          less than that is not missed. Sides take turns, each trains a copy of one network on one batch, and all of
          them donate their state. FP16 on a CPU is emulated in part. No GPU was measured; there the branch of `apply`
          may cost more or less than here, and `gate="where"` is the other choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import optax
from benchmarks.alone import run_alone
from benchmarks.rows import Row, compared
from benchmarks.timing import timed
from benchmarks.turns import Side
from jax import Array

from gradscale.jax import Scaler, apply, loss_scale, scaled, value_and_grad
from gradscale.jax.casting import get_policy
from gradscale.policies.dynamic import Dynamic

CLIP = 1.0
LEARNING_RATE = 1e-4
OURS, TRANSFORMATION, CONTROL = "JAX apply", "JAX scaled", "JAX no scaling, again"
FLAX, JMP, BARE = "flax DynamicScale", "jmp", "no scaling"

State = Any
Loss = Callable[[Any, Any], Array]
Step = Callable[[State, Any], State]


@dataclass(frozen=True)
class Case:
    """A network of equal layers, and how it is trained.

    Attributes:
        bound: what takes the time, as the table calls it.
        precision: types of the arithmetic, as `get_policy` reads them.
        width: of the layers.
        depth: how many.
        batch: rows.
        clip: bound on the norm of the gradients, or None.
    """

    bound: str
    precision: str
    width: int
    depth: int
    batch: int
    clip: float | None

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"step{'' if self.clip is None else ' + clip'}, {self.bound}, MLP of {self.depth} x {self.width}"

    def params(self) -> Any:
        """Returns new parameters."""
        keys = jax.random.split(jax.random.key(0), self.depth)
        return [jax.random.normal(key, (self.width, self.width)) / self.width**0.5 for key in keys]

    def rows(self) -> tuple[Array, Array]:
        """Returns inputs, and what the network shall make of them."""
        return jax.random.normal(jax.random.key(1), (2, self.batch, self.width))[0], jnp.ones((self.batch, self.width))

    def optimizer(self) -> optax.GradientTransformation:
        """Returns Adam, behind a clip if there is one."""
        adam = optax.adam(LEARNING_RATE)
        return adam if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), adam)

    def loss(self, params: Any, rows: Any) -> Array:
        """Returns the mean squared error, in float32."""
        inputs, targets = rows
        return jnp.mean((get_policy(self.precision).wrap(_network)(params, inputs) - targets) ** 2)


def _network(params: Any, x: Array) -> Array:
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return x @ params[-1]


def bare(case: Case) -> tuple[Step, State]:
    """Returns the step with no scaling, and its first state."""
    tx, params = case.optimizer(), case.params()

    def step(state: State, rows: Any) -> State:
        params, opt_state = state
        grads = jax.grad(case.loss)(params, rows)
        return _updated(tx, grads, opt_state, params)

    return step, (params, tx.init(params))


def ours(case: Case) -> tuple[Step, State]:
    """Returns the step with `value_and_grad` and `apply`."""
    tx, params = optax.adam(LEARNING_RATE), case.params()

    def step(state: State, rows: Any) -> State:
        params, opt_state, scaler = state
        _, grads, scaler, result = value_and_grad(case.loss, clip_norm=case.clip)(scaler, params, rows)
        return *apply(tx, grads, opt_state, params, result), scaler

    return step, (params, tx.init(params), Scaler(Dynamic()))


def transformation(case: Case) -> tuple[Step, State]:
    """Returns the step with `scaled`."""
    tx, params = scaled(optax.adam(LEARNING_RATE), Dynamic(), clip_norm=case.clip), case.params()

    def step(state: State, rows: Any) -> State:
        params, opt_state = state
        grads = jax.grad(lambda params: case.loss(params, rows) * loss_scale(opt_state))(params)
        return _updated(tx, grads, opt_state, params)

    return step, (params, tx.init(params))


def with_flax(case: Case) -> tuple[Step, State]:
    """Returns the step with flax' `DynamicScale`, and `where` as its documentation has it."""
    tx, params = case.optimizer(), case.params()

    def step(state: State, rows: Any) -> State:
        params, opt_state, scale = state
        scale, finite, _, grads = scale.value_and_grad(case.loss)(params, rows)
        after = _updated(tx, grads, opt_state, params)
        return *jax.tree.map(partial(jnp.where, finite), after, (params, opt_state)), scale

    # As arrays, so that it compiles once.
    scale = flax.training.dynamic_scale.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536))  # pyright: ignore
    return step, (params, tx.init(params), scale)


def with_jmp(case: Case) -> tuple[Step, State]:
    """Returns the step with jmp, as its documentation has it."""
    tx, params = case.optimizer(), case.params()

    def step(state: State, rows: Any) -> State:
        params, opt_state, scale = state
        grads = scale.unscale(jax.grad(lambda params: scale.scale(case.loss(params, rows)))(params))
        finite = jmp.all_finite(grads)
        after = _updated(tx, grads, opt_state, params)
        return *jmp.select_tree(finite, after, (params, opt_state)), scale.adjust(finite)

    return step, (params, tx.init(params), jmp.DynamicLossScale(jnp.float32(65536), jnp.int32(0)))


def _updated(tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


MAKERS = {BARE: bare, CONTROL: bare, OURS: ours, TRANSFORMATION: transformation, FLAX: with_flax, JMP: with_jmp}


def _side(make: Callable[[Case], tuple[Step, State]], case: Case) -> Side:
    """Returns a side whose turn is one step, which goes on from the one before.

    A step that is not timed comes first: what the side before left in caches and allocators would weigh on this one.
    """
    step, state = make(case)
    compiled = jax.jit(step, donate_argnums=0)
    rows = case.rows()

    def run() -> None:
        nonlocal state
        state = compiled(state, rows)

    return Side(run, prepare=run, synchronize=lambda: jax.block_until_ready(state))


def sides(case: Case) -> dict[str, Side]:
    """Returns the ways to make the step."""
    return {name: _side(make, case) for name, make in MAKERS.items()}


def cases(quick: bool) -> list[tuple[Case, dict[str, float | None]]]:
    """Returns what is trained, and the goals of `apply` against each baseline."""
    optimizer = Case("optimizer-bound", "f32", 512 if quick else 1024, 4, 4, None)
    compute = Case("compute-bound", "f32", 256 if quick else 512, 4, 512, None)
    half = Case("FP16", "p=f32,c=f16,o=f32", 256 if quick else 512, 4, 64, None)
    return [
        (optimizer, {FLAX: 1.00, JMP: 1.00, BARE: None}),
        (compute, {FLAX: 1.00, JMP: 1.00, BARE: 1.02}),
        (half, {FLAX: 1.00, JMP: 1.00, BARE: None}),
        (replace(optimizer, clip=CLIP), {FLAX: 0.90, JMP: 1.00, BARE: 1.00}),
        (replace(compute, clip=CLIP), {FLAX: 0.90, JMP: 1.00, BARE: 1.00}),
        (replace(half, clip=CLIP), {FLAX: 0.90, JMP: 1.00, BARE: 1.00}),
    ]


def rows(quick: bool) -> list[Row]:
    """Returns a row for each case and baseline, one for `scaled`, and one for the baseline against itself."""
    found: list[Row] = []
    for case, goals in cases(quick):
        seconds = timed(partial(sides, case), 10 if quick else 100, quick)
        for baseline, goal in goals.items():
            found.append(compared(f"{OURS}: {case.name}", baseline, seconds[OURS], seconds[baseline], goal))
        found.append(compared(f"{TRANSFORMATION}: {case.name}", FLAX, seconds[TRANSFORMATION], seconds[FLAX]))
        found.append(compared(f"{CONTROL}: {case.name}", BARE, seconds[CONTROL], seconds[BARE]))
    return found


if __name__ == "__main__":
    run_alone("A compiled JAX step with loss scaling", rows)
