"""FP16 weights and gradients in MXNet's Gluon, with float32 masters, two contexts and clipping."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from sklearn.datasets import load_digits

from gradscale import Dynamic
from gradscale.mxnet import init_trainer, scale_loss

STEPS = 200
BATCH = 64
CONTEXTS = [mx.gpu(i) for i in range(mx.context.num_gpus())] or [mx.cpu(0), mx.cpu(1)]

digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.float32)


class HalfDense(gluon.HybridBlock):
    """A dense layer with weights and outputs in float16. MXNet has no float16 matrix product on a CPU."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(outputs, inputs), dtype="float16", init=mx.init.Xavier())
            self.bias = self.params.get("bias", shape=(outputs,), dtype="float16", init=mx.init.Zero())

    def hybrid_forward(self, F, x, weight, bias):
        wide = (F.cast(one, dtype="float32") for one in (x, weight, bias))
        return F.cast(F.FullyConnected(*wide, num_hidden=self.outputs), dtype="float16")


mx.random.seed(0)
net = gluon.nn.HybridSequential()
net.add(HalfDense(64, 128), gluon.nn.Activation("relu"), HalfDense(128, 10))
net.initialize(ctx=CONTEXTS)
net.hybridize()

trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 2e-3, "multi_precision": True})
scaler = init_trainer(trainer, Dynamic(), clip_norm=1.0)  # right after the trainer is made
criterion = gluon.loss.SoftmaxCrossEntropyLoss()

losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=BATCH)
    xs = gluon.utils.split_and_load(nd.array(pixels[batch], dtype="float16"), CONTEXTS)
    ys = gluon.utils.split_and_load(nd.array(labels[batch]), CONTEXTS)
    with autograd.record():
        found = [criterion(net(x).astype("float32"), y) for x, y in zip(xs, ys, strict=True)]
        with scale_loss(found, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(BATCH)  # sums, checks, unscales, clips, and updates or skips
    losses.append(np.mean([loss.mean().asscalar() for loss in found]))

metrics = scaler.metrics()
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}", end=", ")
print(f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}")
