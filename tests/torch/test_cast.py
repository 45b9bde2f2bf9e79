"""Casts of tensors in nested containers: what is cast, and what stays the same object."""

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from gradscale.torch.cast import cast as cast_any
from gradscale.torch.cast import tensors_in
from gradscale.torch.precision.casts import CASTABLE

HALF = torch.float16

PACKED = pytest.mark.cpu_only("lengths of packed sequences are on the CPU, whatever the default device is")


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "n"


@dataclass
class Checked:
    x: Tensor
    total: float = field(init=False)

    def __post_init__(self) -> None:
        self.total = 7.0


class Record(dict[str, Any]):
    pass


def one() -> Tensor:
    return torch.ones(2)


def cast(value: Any, dtype: torch.dtype) -> Any:
    return cast_any(value, dtype, CASTABLE)


@pytest.mark.parametrize(
    ("make", "find"),
    [
        (lambda x: x, lambda v: v),
        (lambda x: (1, x), lambda v: v[1]),
        (lambda x: [[x]], lambda v: v[0][0]),
        (lambda x: {"k": {"m": (x,)}}, lambda v: v["k"]["m"][0]),
        (lambda x: OrderedDict(k=x), lambda v: v["k"]),
        (lambda x: deque([x]), lambda v: v[0]),
        (lambda x: Pair(x, "s"), lambda v: v.a),
        (lambda x: Pair(one(), Pair(x, None)), lambda v: v.b.a),
        (lambda x: Frozen(x), lambda v: v.x),
        (lambda x: [Frozen(Checked(x))], lambda v: v[0].x.x),  # type: ignore[arg-type]
        (lambda x: Record(k=x), lambda v: v["k"]),
        (lambda x: UserDict(k=[x]), lambda v: v["k"][0]),
        pytest.param(lambda x: pack_sequence([x]), lambda v: v.data, marks=PACKED),
    ],
)
def test_tensors_are_cast_in_every_container(make: Any, find: Any) -> None:
    original = make(one())
    made = cast(original, HALF)
    assert type(made) is type(original)
    assert find(made).dtype is HALF
    assert find(original).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16])
def test_the_three_floats_are_cast_into_one_another(dtype: torch.dtype, to: torch.dtype) -> None:
    assert cast(one().to(dtype), to).dtype is to


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float64, torch.complex64])
def test_other_tensors_are_the_same_object_afterwards(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert cast([tensor], HALF)[0] is tensor


@pytest.mark.parametrize("value", [None, "text", 3, 2.5, Frozen, torch.float32])
def test_what_is_no_tensor_is_left_alone(value: Any) -> None:
    assert cast((value,), HALF)[0] is value


NO_CASTS = [
    one(),
    [one(), [one()]],
    (one(), 3),
    {"a": {"b": one()}},
    OrderedDict(k=[one()]),
    deque([one()]),
    Pair(one(), [one()]),
    Frozen(one()),
    Record(k=one()),
    torch.Size([2]),
]
"""Values that are float32 already, in every container."""


@pytest.mark.parametrize("value", NO_CASTS, ids=lambda value: type(value).__name__)
def test_what_needs_no_cast_is_the_same_object(value: Any) -> None:
    assert cast(value, torch.float32) is value


def test_casting_a_dataclass_does_not_build_it_again() -> None:
    value = Checked(one())
    value.total = 1.0
    assert cast(value, HALF).total == 1.0


def test_a_cast_can_be_differentiated() -> None:
    x = one().requires_grad_()
    cast({"x": x}, HALF)["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize(
    "make",
    [lambda x: x, lambda x: {"k": [(x, 2), Frozen(x)]}, pytest.param(lambda x: pack_sequence([x]), marks=PACKED)],
)
def test_the_tensors_found_are_those_that_are_cast(make: Any) -> None:
    assert [tensor.dtype for tensor in tensors_in(cast(make(one()), HALF))] == [HALF] * len(
        list(tensors_in(make(one())))
    )
    assert list(tensors_in((None, 2, "text", slice(3)))) == []


def test_nested_tuples_are_cast_in_one_compiled_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda value: cast(value, HALF), fullgraph=True, backend="eager")
    first, (second, third) = compiled((one(), (one(), torch.arange(2))))
    assert [first.dtype, second.dtype, third.dtype] == [HALF, HALF, torch.int64]
    torch._dynamo.reset()


def test_fp8_is_cast_only_where_that_is_asked_for() -> None:
    tensor = one().to(torch.float8_e4m3fn)
    assert cast(tensor, HALF) is tensor
    assert cast_any(tensor, HALF, (torch.float8_e4m3fn,)).dtype is HALF
