"""The demo in numpy, with nothing but numpy: true float16 arithmetic, written out."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gradscale.demo.digits import AUTOENCODER, GROWTH_INTERVAL, load_digits
from gradscale.demo.numpy.train import NumpyTrainer
from gradscale.demo.train import Demo, Experiment, recipes
from gradscale.demo.workers import Workers
from gradscale.policies.dynamic import Dynamic


@contextmanager
def _one_blas_thread() -> Iterator[Workers]:
    """Yields the caller's thread. Matrices this small are faster on one thread, and on a busy machine by far."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"), Workers() as workers:
        yield workers


DEMO = Demo(
    recipes(Dynamic(growth_interval=GROWTH_INTERVAL)),
    [Experiment(AUTOENCODER, 800, lambda seed: partial(NumpyTrainer, load_digits(seed), seed))],
    _one_blas_thread,
)
