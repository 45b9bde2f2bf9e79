"""The random numbers of stochastic rounding."""

import numpy as np
import torch

from gradscale.kernels.torch_storage import Stochastic as Noise

CPU = torch.device("cpu")


def split_mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64, on unsigned numbers."""
    with np.errstate(over="ignore"):
        numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))


def test_the_numbers_are_those_of_split_mix_64() -> None:
    noise = Noise(seed=-5)
    for step in range(3):
        with np.errstate(over="ignore"):
            key = split_mix(split_mix(np.array([step], np.uint64)) - np.uint64(5))
            expected = split_mix(np.arange(1000, dtype=np.uint64) + key)
        assert noise.draw(1000, CPU).numpy().view(np.uint64).tolist() == expected.tolist()
        noise.end_step(None)


def test_every_bit_is_as_often_one_as_zero_and_neighbours_are_independent() -> None:
    bits = np.unpackbits(Noise(seed=3).draw(2**16, CPU).numpy().view(np.uint8).reshape(-1, 8), axis=1)
    # Within six standard deviations of 2**16 fair coins, whose mean has one of 2**-9.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 6 * 2**-9
    assert np.abs((bits[1:] ^ bits[:-1]).mean(axis=0) - 0.5).max() < 6 * 2**-9


def test_drawing_in_parts_is_drawing_at_once_and_steps_differ() -> None:
    parts, whole = Noise(1), Noise(1)
    first = whole.draw(7, CPU)
    assert torch.equal(torch.cat([parts.draw(3, CPU), parts.draw(4, CPU)]), first)
    whole.end_step(None)
    assert not torch.equal(whole.draw(7, CPU), first)
    assert not torch.equal(Noise(2).draw(7, CPU), first)


def test_a_skipped_step_is_not_counted_and_its_numbers_are_used_by_the_next() -> None:
    noise = Noise(1)
    first = noise.draw(5, CPU)
    noise.end_step(torch.ones(()))
    assert torch.equal(noise.draw(5, CPU), first)
    noise.end_step(torch.full((), 2.0))  # the flags of two devices, added up by torch
    assert torch.equal(noise.draw(5, CPU), first)
    noise.end_step(torch.zeros(()))
    assert not torch.equal(noise.draw(5, CPU), first)


def test_a_saved_state_continues_with_the_same_numbers() -> None:
    noise, other = Noise(1), Noise(2)
    noise.end_step(None)
    other.load(noise.state())
    for _ in range(2):
        assert torch.equal(other.draw(5, CPU), noise.draw(5, CPU))
        noise.end_step(None)
        other.end_step(None)
