"""The demo in PyTorch: real FP16 autocast and emulated FP8, on a GPU or on the CPU."""

from functools import partial

from gradscale.demo.torch.cnn import DigitsTask
from gradscale.demo.torch.language import LanguageTask
from gradscale.demo.torch.train import load, workers
from gradscale.demo.train import FP8_RECIPES, Demo, Experiment, recipes

DEMO = Demo(
    (*recipes("auto"), *FP8_RECIPES),
    [
        Experiment(subject, steps, partial(load, subject.model))
        for subject, steps in ((DigitsTask.subject, 400), (LanguageTask.subject, 300))
    ],
    workers,
)
