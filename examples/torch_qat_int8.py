"""INT8 quantization-aware training in FP16, and its export to ONNX with quantize and dequantize nodes."""

import copy
import warnings

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.nn.functional import mse_loss, one_hot
from torch.nn.utils.parametrize import register_parametrization

from gradscale.torch import LossScaler, casts

STEPS = 400
FakeQuantize = ao.FusedMovingAvgObsFakeQuantize
INT8 = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8}


def quantized(layer: nn.Module) -> nn.Module:
    """Returns the layer with INT8 input and INT8 weights. All zero points are 0, as TensorRT wants them."""
    by_channel = FakeQuantize(ao.MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, **INT8)
    register_parametrization(layer, "weight", by_channel)
    as_a_whole = FakeQuantize(ao.MovingAverageMinMaxObserver, qscheme=torch.per_tensor_symmetric, **INT8)
    return nn.Sequential(as_a_whole, layer)


def train(model: nn.Module, half: bool) -> str:
    scaler, generator = LossScaler(model), torch.Generator().manual_seed(0)
    scaler.protect_buffers()  # what the observers saw in a skipped step is forgotten
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True), []
    in_float32 = casts(float=[torch.fused_moving_avg_obs_fake_quant])  # observers take no FP16
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half), in_float32:
            chosen = torch.randint(len(train_images), (32,), generator=generator)
            losses.append(mse_loss(model(train_images[chosen]).float(), one_hot(train_labels[chosen], 10).float()))
        scaler.backward(losses[-1])
        scaler.step(optimizer)
        optimizer.zero_grad()
    model.apply(ao.disable_observer)  # the test images must not move the ranges
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, skipped {scaler.metrics()['skipped']:.0f} of {STEPS} steps"


def accuracy(outputs: Tensor) -> float:
    return float((outputs.argmax(dim=1) == test_labels).float().mean())


class Fixed(nn.Module):
    """What a fake quantizer has learned, as a pair of ONNX nodes."""

    def __init__(self, fake: nn.Module) -> None:
        super().__init__()
        shape, self.axis = ((-1,), {"axis": 0}) if fake.is_per_channel else ((), {})
        self.scale, self.zero_point = (nn.Buffer(part.view(shape)) for part in (fake.scale, fake.zero_point.char()))

    def forward(self, x: Tensor) -> Tensor:
        node, grid = torch.onnx.ops.symbolic, (self.scale, self.zero_point)
        levels = node("QuantizeLinear", (x, *grid), self.axis, dtype=torch.int8, shape=x.shape)
        return node("DequantizeLinear", (levels, *grid), self.axis, dtype=x.dtype, shape=x.shape)


torch.manual_seed(0)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
order = torch.randperm(len(pixels))
images = ((pixels - pixels.mean()) / pixels.std()).float().view(-1, 1, 8, 8)[order]
(test_images, train_images), (test_labels, train_labels) = (part.split([450, 1347]) for part in (images, labels[order]))
plain = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
model = nn.Sequential(*(quantized(part) if hasattr(part, "weight") else part for part in copy.deepcopy(plain)))
train(plain, half=False)
closing = train(model, half=True)
scores = {"FP32": accuracy(plain(test_images)), "INT8 in torch": accuracy(model(test_images))}
for name, fake in list(model.named_modules()):
    if isinstance(fake, FakeQuantize):
        model.set_submodule(name, Fixed(fake))
warnings.simplefilter("ignore", FutureWarning)  # torch 2.13's exporter warns of its own code
program = torch.onnx.export(model.eval(), (test_images[:2],), dynamic_shapes=[{0: "n"}], verbose=False)
session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
scores["INT8 in onnxruntime"] = accuracy(torch.tensor(session.run(None, {"input": test_images.numpy()})[0]))
nodes = [node.op_type for node in program.model.graph]
print(f"nodes: {nodes.count('QuantizeLinear')} quantize, {nodes.count('DequantizeLinear')} dequantize")
print("accuracy:", ", ".join(f"{name} {score:.1%}" for name, score in scores.items()))
print(closing)
