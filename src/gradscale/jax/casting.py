"""Which types parameters are kept in, arithmetic is done in, and results are returned in.

Parameters stay float32 and are cast inside the function that is differentiated. Their gradients are then float32
too, so the optimizer works on master weights without a second copy of them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.jax.tree import OVERWRITE_WITH_GRADIENT, is_inside, is_nnx_object

__all__ = ["Cast", "Policy", "cast_to_full", "cast_to_half", "get_policy", "half_dtype"]

T = TypeVar("T")

NAMES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("f16", "float16"),
    "float32": ("full", "f32", "float32"),
    "float64": ("f64", "float64"),
}
"""What each type is called in a policy's text. The first is how it is written, all are read, and so is `half`."""

KEYS = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype"}
"""What a policy's text calls its fields."""

LONG_KEYS = {"params": "p", "compute": "c", "output": "o"}

STATE = ("batch_stats", OVERWRITE_WITH_GRADIENT)
"""Collections of flax linen that are state, not parameters."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Policy:
    """Casts the floating-point arrays of a pytree for storage, arithmetic or output. All else is left as it is.

    A static value: it can be closed over, compared, and passed through `jax.jit`.

    Attributes:
        param_dtype: of parameters, where they are kept and updated.
        compute_dtype: of arithmetic.
        output_dtype: of what is returned.

    >>> policy = Policy(jnp.float32, jnp.float16, jnp.float32)
    >>> policy.cast_to_compute({"count": jnp.int32(3), "weight": jnp.ones(2)})
    {'count': Array(3, dtype=int32), 'weight': Array([1., 1.], dtype=float16)}
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def __post_init__(self) -> None:
        for name in KEYS.values():
            object.__setattr__(self, name, _float_dtype(name, getattr(self, name)))

    def cast_to_param(self, tree: T) -> T:
        """Returns `tree` with its floating-point arrays in `param_dtype`."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Returns `tree` with its floating-point arrays in `compute_dtype`."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Returns `tree` with its floating-point arrays in `output_dtype`."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns the policy with another `output_dtype`."""
        return replace(self, output_dtype=output_dtype)

    def wrap(self, module: Callable[..., Any]) -> "Cast":
        """Returns `module` so that it computes and returns as this policy says.

        Args:
            module: a function of parameters and inputs, such as `apply` of flax or haiku, or a callable pytree that
                holds its parameters, such as a module of equinox.
        """
        return Cast(module, self)

    def __str__(self) -> str:
        dtypes = {key: getattr(self, name).name for key, name in KEYS.items()}
        return ",".join(f"{key}={NAMES.get(dtype, (dtype,))[0]}" for key, dtype in dtypes.items())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast:
    """A module, or a function, that computes in one type and returns in another. A pytree if the module is one.

    Its own parameters and all arguments are cast to `compute_dtype` at each call, and the result to `output_dtype`.
    State that is no parameter stays as it is, in the type it has: statistics of batches, in which small changes would
    be rounded away, and scales and amax histories of FP8. That of flax nnx, random streams included, is updated by the
    call as without the cast. A BatchNorm of nnx without a `dtype` returns the type of its statistics: give it one.

    Attributes:
        module: what is called.
        policy: the types.

    >>> product = get_policy("c=f16,o=f32").wrap(lambda weight, x: weight @ x)
    >>> product(jnp.ones(2), jnp.float32([1, 1e-9])).dtype.name
    'float32'
    """

    module: Any
    policy: Policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module, in `output_dtype`."""
        module, args, kwargs = _without_state((self.module, args, kwargs), self.policy.compute_dtype)
        return _without_state(module(*args, **kwargs), self.policy.output_dtype)


def get_policy(text: str) -> Policy:
    """Returns the policy that a text describes.

    Args:
        text: one type for all, as in `"bf16"`, or some of `params`, `compute` and `output` (or their first letters), as
            in `"p=f32,c=f16,o=f32"`. Parameters are float32 unless it says otherwise; arithmetic is then done in the
            parameters' type, and results are returned in that of the arithmetic.

    Raises:
        ValueError: a key or a type is unknown, or a key comes twice.

    >>> str(get_policy("compute=half,output=f32"))
    'p=full,c=f16,o=full'
    """
    if "=" not in text:
        dtype = parse_dtype(text)
        return Policy(dtype, dtype, dtype)
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        key = LONG_KEYS.get(key, key)
        if key not in KEYS or key in given:
            raise ValueError(f"`text` must say params, compute and output, each at most once. Received: {text!r}.")
        given[key] = parse_dtype(value)
    param = given.get("p", jnp.float32)
    compute = given.get("c", param)
    return Policy(param, compute, given.get("o", compute))


def parse_dtype(name: str) -> Any:
    """Returns the type called `name`.

    Raises:
        ValueError: there is no such type.
    """
    if name == "half":
        return half_dtype()
    for dtype, names in NAMES.items():
        if name in names:
            return jnp.dtype(dtype)
    known = ", ".join(("half", *(known for names in NAMES.values() for known in names)))
    raise ValueError(f"Unknown dtype: it must be one of {known}. Received: {name!r}.")


def half_dtype() -> Any:
    """Returns bfloat16 where the default backend is a TPU, which has no FP16 arithmetic, and float16 elsewhere."""
    return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16)


def cast_to_full(tree: T) -> T:
    """Returns `tree` with its floating-point arrays in float32."""
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Returns `tree` with its floating-point arrays in `half_dtype()`."""
    return cast_floating(tree, half_dtype())


def cast_floating(tree: T, dtype: Any) -> T:
    """Returns `tree` with its floating-point arrays in `dtype`. Python numbers stay: JAX types them weakly."""

    def cast(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        return leaf.astype(dtype) if is_array and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree_util.tree_map(cast, tree)


def _without_state(tree: T, dtype: Any) -> T:
    """Returns `tree` with its floating-point arrays in `dtype`, except for state of modules that is no parameter."""

    def cast(path: Any, node: Any) -> Any:
        if is_nnx_object(node):
            # All other variables are shared, not copied: what a call changes would be changed in the copy, and lost.
            nnx: Any = sys.modules["flax.nnx"]
            structure, params, rest = nnx.split(node, nnx.Param, ...)
            return nnx.merge(structure, cast_floating(params, dtype), rest)
        return node if is_inside(path, *STATE) else cast_floating(node, dtype)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_nnx_object)


def _float_dtype(name: str, value: Any) -> Any:
    """Returns `value` as a dtype, if it is one of floating-point numbers."""
    if value is not None and jnp.issubdtype(value, jnp.floating):
        return jnp.dtype(value)
    raise TypeError(
        f"`{name}` must be a floating-point type, such as `jax.numpy.float16`. Received: {name}={value!r}. "
        'By name: `get_policy("c=f16")`.'
    )
