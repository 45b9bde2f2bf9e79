"""Rules, and states and readings at which a wrong bit would show."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradscale import FP8_E5M2, CheckOnly, Dynamic, Headroom, Histogram, LogMax, Policy, Static
from gradscale.engine.packed import START, Packed
from gradscale.peers.torch_rule import TorchRule
from gradscale.record import fields, with_values

Numbers = np.ndarray[Any, Any]

POLICIES: dict[str, Policy] = {
    "auto": Headroom(),
    "e5m2": Headroom(FP8_E5M2, init_scale=1.0, leak=0.1),
    "dynamic": Dynamic(),
    "third": Dynamic(growth_interval=2, growth_factor=1.1, backoff_factor=0.3, hysteresis=2, min_scale=2.0**-126),
    "clean": Dynamic(growth_interval=1, refill="clean", hysteresis=3, max_scale=2.0**24),
    "log-max": LogMax(),
    "memory": LogMax(beta1=0.9, beta2=0.5, deviations=1.7, init_scale=3.0),
    "histogram": Histogram(),
    "edge": Histogram(period=3, edge=0.3, threshold=0.1, init_scale=3.0),
    "static": Static(3.0),
    "check only": CheckOnly(),
    "torch": TorchRule(growth_interval=3),
}

FLOATS = np.array(
    "0 1.4e-45 7.3e-40 1.1754944e-38 1.7e-38 1e-30 5.9604645e-08 0.1 0.33333334 1 1.0000001 3 16 65504 65536 16777218 "
    "1e20 9.223372e18 1.8446744e19 8.507059e37 3e38".split(),
    np.float32,
)
COUNTS = np.array([0, 1, 2, 3, 4, 15, 16, 1999, 2000, 2**30, 2**31 - 2, 2**31 - 1], np.int32)


def variants(policy: Policy) -> Iterator[Packed]:
    """Yields the kernels of a rule: without a norm, then with the largest magnitude beside it or not, and clipping.

    And those of a drop-in, without a norm, and with gradients that were divided while they were checked.
    """
    yield Packed(policy)
    yield Packed(policy, loss_gates=False)
    yield Packed(policy, shrinks=True, loss_gates=False)
    for amax, clips in itertools.product((False, True), (False, True)):
        yield Packed(policy, norm=True, amax=amax, clips=clips)


def floats(count: int, generator: np.random.Generator) -> Numbers:
    """Returns numbers that are not negative: edges, neighbors of edges, and numbers between them."""
    between = np.ldexp(1 + generator.random(count), generator.integers(-149, 127, count))
    near = np.nextafter(generator.choice(FLOATS, count), generator.choice(np.array([0, 3.4e38], np.float32), count))
    kind = generator.integers(0, 4, count)
    return np.select([kind == 0, kind == 1], [generator.choice(FLOATS, count), near], between).astype(np.float32)


def numbers(count: int, columns: int, generator: np.random.Generator) -> Numbers:
    """Returns readings, one row for each state. A fifth of the rows has a NaN or an infinity."""
    found = floats(count * columns, generator).reshape(count, columns)
    narrow = generator.random(count) < 0.5  # rows whose numbers are within the range of FP16
    found = np.where(narrow[:, None], np.fmod(found, np.float32(65504)), found)
    rows = np.flatnonzero(generator.random(count) < 0.2)
    found[rows, generator.integers(0, columns, len(rows))] = generator.choice(
        np.array([np.nan, np.inf], np.float32), len(rows)
    )
    return found * generator.choice(np.array([-1, 1], np.float32), found.shape)


def states(packed: Packed, count: int, generator: np.random.Generator) -> Numbers:
    """Returns packed states of a rule, one in each row; the scale of half of them is that at the start."""
    start = packed.policy.start()
    leaves = {field.name: _leaf(field, start, count, generator) for field in fields(start)}
    scales = np.ldexp(
        generator.choice(np.array([1, 1, 1.1, 1.7], np.float32), count), generator.integers(-126, 126, count)
    )
    leaves["scale"] = np.where(generator.random(count) < 0.5, start.scale, scales)
    ratio = generator.random(count).astype(np.float32)
    outcome = {name: np.broadcast_to(value, count) for name, value in START._asdict().items()}
    outcome["amax_ratio"] = np.where(ratio < 0.1, np.float32(2.0**-149), ratio)
    return packed.pack(with_values(start, leaves), type(START)(**outcome))


def _leaf(field: Any, start: Any, count: int, generator: np.random.Generator) -> Numbers:
    kind = np.asarray(getattr(start, field.name)).dtype
    if kind == np.int32:
        some = generator.integers(0, 2**31, count, np.int32)
        return np.where(generator.random(count) < 0.2, some, generator.choice(COUNTS, count))
    if kind == np.bool_:
        return generator.random(count) < 0.5
    signs = np.array([-1, 1], np.float32) if field.metadata["signed"] else np.array([1], np.float32)
    return floats(count, generator) * generator.choice(signs, count)


def expected(packed: Packed, before: Numbers, found: Numbers, first: int, end: int, clip_norm: float) -> Numbers:
    """Returns the states that the rule on numpy's arrays has."""
    state, outcome = packed.unpack(before)
    values = packed.step(state, outcome.amax_ratio, packed.read(found, first, end, clip_norm), np)
    columns = [np.broadcast_to(value, len(before)).copy() for value in values]
    assert [column.dtype for column in columns] == list(packed.kinds.values())
    return np.stack([each.astype(np.int32) if each.dtype == np.bool_ else each.view(np.int32) for each in columns], -1)


def differ(packed: Packed, ours: Numbers, theirs: Numbers) -> Numbers:
    """Returns where packed states have other bits. One NaN is as good as another."""
    floating = np.array([kind is np.float32 for kind in packed.kinds.values()])
    nans = floating & np.isnan(ours.view(np.float32)) & np.isnan(theirs.view(np.float32))
    return (ours != theirs) & ~nans
