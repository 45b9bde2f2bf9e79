"""Versions of JAX: one that is too old is refused, and varying axes are found under either name."""

import runpy
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradscale.jax import compat


def test_a_jax_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    monkeypatch.setattr(jax, "__version__", "0.6.2")
    with pytest.raises(ImportError, match=r"needs jax 0\.7\.0 or newer\. Received: jax 0\.6\.2\. .*gradscale\[jax\]"):
        runpy.run_path(compat.__file__)


@pytest.mark.parametrize(
    "kind",
    [
        SimpleNamespace(manual_axis_type=SimpleNamespace(varying={"data"})),
        SimpleNamespace(vma=frozenset({"data"})),
    ],
    ids=["manual_axis_type", "vma"],
)
def test_varying_axes_are_read_under_the_name_of_any_version(kind: Any) -> None:
    assert compat.varying_axes(kind) == {"data"}


@pytest.mark.parametrize("kind", [SimpleNamespace(), SimpleNamespace(vma=None), SimpleNamespace(manual_axis_type=None)])
def test_a_type_without_varying_axes_has_none(kind: Any) -> None:
    assert compat.varying_axes(kind) == frozenset()


def test_varying_axes_are_found_and_added_under_shard_map() -> None:
    def local(shared: Any, shard: Any) -> Any:
        found.extend(compat.varying_axes(jax.typeof(x)) for x in (shared, shard, compat.vary(shared, ("data",))))
        return shard

    found: list[Any] = []
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))(jnp.ones(8), jnp.ones(8))
    assert found == [frozenset(), {"data"}, {"data"}]
