"""The demo in PyTorch: real FP16 autocast and emulated FP8, on a GPU or on the CPU."""

from functools import partial

from gradscale.demo.torch.cnn import DigitsTask
from gradscale.demo.torch.language import LanguageTask
from gradscale.demo.torch.train import load, workers
from gradscale.demo.train import FP8_RECIPES, RECIPES, Demo, Experiment

DEMO = Demo(
    # Without the static scale, which the other frameworks show: two models and FP8 take long enough.
    (*(recipe for recipe in RECIPES if recipe.policy != "static"), *FP8_RECIPES),
    [
        Experiment(subject, steps, partial(load, subject.model), seconds)
        for subject, steps, seconds in ((DigitsTask.subject, 400, 30.0), (LanguageTask.subject, 300, 25.0))
    ],
    workers,
)
