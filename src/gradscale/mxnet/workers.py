"""Room two, agree, for training on several machines: what is not finite on one worker counts for all."""

from collections.abc import Callable
from typing import Any

from mxnet import gluon, nd


class Workers:
    """The workers that share a trainer's key-value store. Gradients they share already; this is for the rest.

    Args:
        trainer: the trainer of this worker.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._known_to: Any = None

    def all(self, *flags: bool) -> list[bool]:
        """Returns for each flag whether it is True on every worker. Every worker must ask. Waits for the others.

        A trainer that adds up the gradients by means of its own has workers that nobody here can ask. It must not
        decide by what they cannot see: then the answer is True, and gradients that are not finite decide.
        """
        if type(self._trainer)._allreduce_grads is not gluon.Trainer._allreduce_grads:
            return [True] * len(flags)
        store = self._trainer._kvstore
        if store is None or store.num_workers == 1:
            return list(flags)
        key = len(self._trainer._params)  # the keys before are the parameters
        count = nd.array([0 if flag else 1 for flag in flags])
        if self._known_to is not store:
            store.broadcast(key, nd.zeros(len(flags)), out=nd.zeros(len(flags)))
            self._known_to = store
        store.pushpull(key, count, out=count)
        return (count.asnumpy() == 0).tolist()


def init_params_and_wait(init_params: Callable[[], None]) -> None:
    """Gives the key-value store the parameters, and waits until this worker has them back.

    Stands in for `Trainer._init_params`. MXNet goes on at once to add up gradients under the same keys, and the weights
    that a slow worker gets may be that sum. No sum is complete without it, so it is enough if every worker waits for
    its own weights.
    """
    init_params()
    nd.waitall()
