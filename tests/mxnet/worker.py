"""One of the processes of a distributed run, as its environment says: prints what becomes of every step."""

import json
import math
import os
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet as mx  # which runs here, for as long as it is needed, if this is the scheduler or a server

from tests.mxnet.helpers import backward, make_parameter, make_trainer, weights

from gradscale import Dynamic
from gradscale.mxnet import init_trainer

CLEAN = (0.5, 0.25, 1.0)
INF = (0.5, math.inf, 1.0)


def main() -> None:
    """Takes three steps: all clean; with an inf on worker 1 alone; and with a loss on worker 1 alone that is NaN."""
    store = mx.kv.create("dist_sync")
    trainer = make_trainer(make_parameter(), kvstore=store)
    scaler = init_trainer(trainer, Dynamic())
    is_second = store.rank == 1
    for slope, loss in ((CLEAN, 1.0), (INF if is_second else CLEAN, 1.0), (CLEAN, math.nan if is_second else 1.0)):
        backward(trainer, slope, value=loss)
        trainer.step(2)
        print(json.dumps([scaler.last.status, scaler.loss_scale, weights(trainer)]))


if __name__ == "__main__" and os.environ["DMLC_ROLE"] == "worker":
    main()
