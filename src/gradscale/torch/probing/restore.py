"""Everything that a step changes, put back after a probe."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from gradscale.torch.accumulation.retry import Stash

probing: ContextVar[bool] = ContextVar("probing", default=False)
"""Whether a probe runs, whose forward passes are not part of training."""


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Generator[None]:
    """Puts back gradients, buffers and torch's random numbers at the end of the block.

    Inside, parameters have no gradients, and hooks that wait for one are not called. Costs a copy of the buffers.
    """
    # Frozen ones, too: a step may be told to train them.
    parameters = list({id(each): each for module in modules for each in module.parameters()}.values())
    buffers = {id(each): each for module in modules for each in module.buffers()}.values()
    copies = [(each, each.detach().clone()) for each in buffers]
    with _same_random_numbers(modules):
        stash = Stash(parameters)
        token = probing.set(True)
        try:
            yield
        finally:
            probing.reset(token)
            stash.restore()
            for buffer, copy in copies:
                # Through `data`, which does not raise the version: a graph that was made before stays valid.
                buffer.data.copy_(copy)


@contextmanager
def without_gradients(leaves: Sequence[Tensor]) -> Generator[None]:
    """Takes the gradients of leaves away in the block, such as inputs that are no parameters, and puts them back."""
    stash = Stash(leaves)
    try:
        yield
    finally:
        stash.restore()


@contextmanager
def _same_random_numbers(modules: Sequence[nn.Module]) -> Generator[None]:
    """Draws the numbers in the block once more after it, on the CPU and on the devices of the modules."""
    devices = {each.device for module in modules for each in (*module.parameters(), *module.buffers())}
    with torch.random.fork_rng(devices=[]):
        kinds = sorted({device.type for device in devices} - {"cpu", "meta"})
        if not kinds or not hasattr(torch.get_device_module(kinds[0]), "get_rng_state"):
            yield
            return
        indices = [device for device in devices if device.type == kinds[0]]
        with torch.random.fork_rng(devices=indices, device_type=kinds[0]):
            yield
