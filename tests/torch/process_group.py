"""Ending a process group."""

import time

import torch.distributed as dist


def end_process_group() -> None:
    """Destroys the process group, once its threads have freed their tensors."""
    # The destructor of gloo waits for its threads. Up to torch 2.6 it holds Python's lock while it does, which a thread
    # needs to free a tensor that Python knows: both wait for ever. Sleeping gives the lock to the thread.
    time.sleep(0.05)
    dist.destroy_process_group()
