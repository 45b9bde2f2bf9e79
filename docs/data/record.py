"""Records what the pages under Learn show: gradient histograms of real training runs, and one FP16 run with overflows.

Command:  python -m docs.data.record
Needs:    pip install ".[demo,torch]"
Writes:   docs/data/histograms.json and docs/data/dynamic_run.json. Takes about a minute on two CPU cores.

The models, data, seeds and numbers of steps are those of `make demo`. The gradients are those of the FP32 runs, of
parameters and of activations, read at every tenth step, unscaled. Another machine rounds sums in another order, so its
counts differ a little.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from examples.demo.loop import SAMPLE_EVERY, Recipe
from examples.demo.with_torch import TorchTrainer, load
from torch import nn

from gradscale import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Dynamic, NoScaling
from gradscale.histogram import EXPONENTS, ExponentHistogram, exponent_histogram

HERE = Path(__file__).parent
SEED = 0

FORMATS = (FP16, FP8_E5M2, FP8_E4M3, BF16)

LAYERS = {
    "cnn": {"0": "first convolution", "12": "7th of 13 convolutions", "24": "last convolution", "27": "output layer"},
    "gpt": {
        "trunk.blocks.0.queries_keys_values": "attention of the first block",
        "next": "main head",
        "ahead": "second head, whose loss has a weight of 1e-5",
    },
}
"""The layers that get a histogram of their own, by their names in the model."""

ALL, FIRST_STEP = "all layers", "all layers, first step"

TITLES = {"cnn": "CNN of 13 layers", "gpt": "GPT with two heads"}
STEPS = {"cnn": 400, "gpt": 300}


def layer_histograms(model: str) -> dict[str, ExponentHistogram]:
    """Returns the histogram of each layer of `LAYERS`, and of all layers, over an FP32 run of the demo."""
    trainer: Any = load(model, SEED)(Recipe("FP32", FP32, NoScaling()))
    histograms: dict[str, ExponentHistogram] = defaultdict(lambda: exponent_histogram([]))
    for step in range(STEPS[model]):
        if step % SAMPLE_EVERY == 0:
            _sample(trainer, histograms)
        if step == 0:
            histograms[FIRST_STEP] = histograms[ALL]
        trainer.step(sample=False)
    return histograms


def _sample(trainer: TorchTrainer, histograms: dict[str, ExponentHistogram]) -> None:
    """Adds the gradients of the next batch, without drawing it from the run's own random numbers."""
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    batch = trainer.task.batch(generator)
    grads: dict[str, list[torch.Tensor]] = defaultdict(list)
    handles = [
        module.register_forward_hook(_watch(grads[name]))
        for name, module in trainer.model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    trainer.task.losses(trainer.model, batch).trained.backward()
    for handle in handles:
        handle.remove()
    for name, parameter in trainer.model.named_parameters():
        grads[name.rpartition(".")[0]].append(parameter.grad)  # type: ignore[arg-type]
    for name, tensors in grads.items():
        counted = exponent_histogram([tensor.detach().numpy() for tensor in tensors])
        histograms[ALL] += counted
        if name in LAYERS[trainer.task.subject.model]:
            histograms[name] += counted
    trainer.optimizer.zero_grad()


def _watch(grads: list[torch.Tensor]) -> Any:
    """Returns a hook that appends the gradients of a layer's input and output, once they are computed."""

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del module
        for activation in (*inputs, output):
            if activation.requires_grad:
                activation.register_hook(lambda grad: grads.append(grad.detach()))

    return hook


def as_json(histogram: ExponentHistogram) -> dict[str, Any]:
    """Returns the bins from the first to the last that is not empty."""
    filled = histogram.counts.nonzero()[0]
    first, last = int(filled[0]), int(filled[-1])
    return {
        "first_exponent": int(EXPONENTS[first]),
        "counts": histogram.counts[first : last + 1].tolist(),
        "zeros": int(histogram.zeros),
    }


def record_histograms() -> dict[str, Any]:
    """Returns the formats' limits and every histogram, with its title."""
    recorded = []
    for model in ("cnn", "gpt"):
        found = layer_histograms(model)
        for name, title in {FIRST_STEP: FIRST_STEP, ALL: ALL, **LAYERS[model]}.items():
            recorded.append({"title": f"{TITLES[model]}: {title}", **as_json(found[name])})
    limits = ("smallest_subnormal", "smallest_normal", "max", "overflow_threshold")
    formats = {each.name: {limit: getattr(each, limit) for limit in limits} for each in FORMATS}
    return {"formats": formats, "histograms": recorded}


def record_dynamic_run() -> dict[str, Any]:
    """Returns the scales, skipped steps and losses of the CNN in FP16 under a dynamic scale that starts too high."""
    # torch's rule, but for an interval of 25 instead of 2,000 steps: the run has 400.
    policy = Dynamic(init_scale=2.0**24, growth_interval=25)
    trainer = load("cnn", SEED)(Recipe("FP16 dynamic", FP16, policy))
    steps = [trainer.step(sample=False) for _ in range(STEPS["cnn"])]
    return {
        "policy": "Dynamic(init_scale=2**24, growth_interval=25)",
        "scales": [step.scale for step in steps],
        "skipped": [index for index, step in enumerate(steps) if step.skipped],
        "scores": trainer.scores(),
    }


def main() -> None:
    torch.set_num_threads(1)
    for name, record in (("histograms", record_histograms), ("dynamic_run", record_dynamic_run)):
        path = HERE / f"{name}.json"
        path.write_text(json.dumps(record()) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
