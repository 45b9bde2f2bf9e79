"""One of the processes of a distributed run, as its environment says: prints the status of every step."""

import json
import math
import os
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet as mx  # which runs here, for as long as it is needed, if this is the scheduler or a server

from tests.mxnet.helpers import backward, make_parameter, make_trainer, weights

from gradscale import Dynamic
from gradscale.mxnet import init_trainer, unscale

CLEAN = (0.5, 0.25, 1.0)
INF = (0.5, math.inf, 1.0)


def main() -> None:
    """Takes four steps. The first is clean. In each of the others something is wrong on worker 1 alone.

    That is an inf; a loss that is NaN; and an inf that is seen, and edited away, before gradients are added up.
    """
    store = mx.kv.create("dist_sync")
    trainer = make_trainer(make_parameter(), kvstore=store)
    scaler = init_trainer(trainer, Dynamic())
    is_second = store.rank == 1
    for slope, loss in ((CLEAN, 1.0), (INF if is_second else CLEAN, 1.0), (CLEAN, math.nan if is_second else 1.0)):
        backward(trainer, slope, value=loss)
        trainer.step(2)
        print(json.dumps([scaler.last.status(), scaler.loss_scale, weights(trainer)]))
    backward(trainer, INF if is_second else CLEAN)
    unscale(trainer)
    trainer._params[0].grad()[:] = 0.25
    trainer.step(2)
    print(json.dumps([scaler.last.status(), scaler.loss_scale, weights(trainer)]))


if __name__ == "__main__" and os.environ["DMLC_ROLE"] == "worker":
    main()
