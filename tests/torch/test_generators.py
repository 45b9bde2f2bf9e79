"""Seeded generators: the same numbers from the same seed, and copies that continue."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscale.torch.generators import Generators

CPU = torch.device("cpu")


def draw(generators: Generators) -> Tensor:
    return torch.rand(4, generator=generators.on(CPU))


def test_a_seed_decides_the_numbers() -> None:
    assert torch.equal(draw(Generators(1)), draw(Generators(1)))
    assert not torch.equal(draw(Generators(1)), draw(Generators(2)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_continues_where_the_original_is(copied: Any) -> None:
    generators = Generators(1)
    draw(generators)
    twin = copied(generators)
    assert torch.equal(draw(twin), draw(generators))


def test_a_saved_state_continues() -> None:
    generators, other = Generators(1), Generators(2)
    draw(generators)
    other.load(generators.state())
    assert torch.equal(draw(other), draw(generators))
