"""The demo in numpy, with nothing but numpy: true float16 arithmetic, written out."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gradscale.demo.digits import AUTOENCODER, load_digits
from gradscale.demo.numpy.train import NumpyTrainer
from gradscale.demo.train import RECIPES, Demo, Experiment
from gradscale.demo.workers import Workers


@contextmanager
def _one_blas_thread() -> Iterator[Workers]:
    """Yields the caller's thread. Matrices this small are faster on one thread, and on a busy machine by far."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"), Workers() as workers:
        yield workers


DEMO = Demo(
    RECIPES,
    [Experiment(AUTOENCODER, 800, lambda seed: partial(NumpyTrainer, load_digits(seed), seed), 20.0)],
    _one_blas_thread,
)
