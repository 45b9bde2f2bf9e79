"""The tasks of the study."""

from collections.abc import Callable
from functools import partial

from benchmarks.study.adapters import AdapterTask
from benchmarks.study.adversarial import AdversarialTask
from benchmarks.study.classification import ConsistencyTask, DeepTask, DistillationTask
from benchmarks.study.contrastive import ContrastiveTask
from benchmarks.study.control import ControlTask
from benchmarks.study.distributions import FlowTask, PoissonTask, QuantileTask, ScoreTask
from benchmarks.study.generative import AutoencoderTask, DiffusionTask
from benchmarks.study.language import LENGTH, SEQUENCES, LanguageTask, Trouble, warmed_up
from benchmarks.study.recurrent import RecurrentTask
from benchmarks.study.regression import HeavyTailTask, MixtureTask
from benchmarks.study.several_losses import InTurnsTask, WeightedTask
from benchmarks.study.sparse import FactorizationTask, FocalTask, TripletTask
from benchmarks.study.structured import CopyTask, GraphTask, MaskedTask, NoisyLabelsTask
from benchmarks.study.task import Task, TaskSpec
from benchmarks.study.transformer import STEPS, TransformerTask
from benchmarks.study.values import QLearningTask
from benchmarks.study.vision import VisionTask

SUMMED = SEQUENCES * LENGTH
"""The loss factor of a loss that is summed over characters and not averaged."""


def _language(**trouble: object) -> partial[LanguageTask]:
    return partial(LanguageTask, trouble=Trouble(**trouble))  # type: ignore[arg-type]


def _held_out(make: Callable[[int], Task], steps: int = 1000, **kind: bool) -> TaskSpec:
    return TaskSpec(make, steps, held_out=1, **kind)


def _second(make: Callable[[int], Task], steps: int = 800, **kind: bool) -> TaskSpec:
    return TaskSpec(make, steps, held_out=2, **kind)


_char_gpt = _language()
_fine_tuning = partial(warmed_up, trouble=Trouble(loss_factor=SUMMED, warm_steps=200))

TASKS: dict[str, TaskSpec] = {
    "char-GPT": TaskSpec(_char_gpt),
    "GAN": TaskSpec(AdversarialTask),
    "policy gradient": TaskSpec(ControlTask),
    "learning-rate spike": TaskSpec(_language(hot_steps=(500, 520))),
    "bad batches: 1% x 100": TaskSpec(_language(bad_share=0.01), bad_batches=True),
    "tiny: loss x 1e-7": TaskSpec(_language(loss_factor=1e-7)),
    "start at 2^32": TaskSpec(_char_gpt, init_scale=2.0**32),
    "deep CNN": TaskSpec(VisionTask),
    "CNN, bad batches: 1% x 100": TaskSpec(partial(VisionTask, bad_share=0.01), bad_batches=True),
    "fine-tuning, 3 steps": TaskSpec(_fine_tuning, steps=3),
    "fine-tuning, 10 steps": TaskSpec(_fine_tuning, steps=10),
    "fine-tuning, 50 steps": TaskSpec(_fine_tuning, steps=50),
    "LSTM, summed loss, bad batches: 0.5% x 300": _held_out(
        partial(RecurrentTask, bad_share=0.005, bad_factor=300.0), 600, bad_batches=True
    ),
    "VAE": _held_out(AutoencoderTask),
    "diffusion": _held_out(DiffusionTask),
    "contrastive": _held_out(ContrastiveTask),
    "ViT, cosine to 0": _held_out(TransformerTask, STEPS),
    "distillation": _held_out(DistillationTask),
    "deep MLP without norm": _held_out(DeepTask),
    "low-rank adapters": _held_out(AdapterTask),
    "mixture density": _held_out(MixtureTask),
    "heavy-tailed regression": _held_out(HeavyTailTask),
    "loss weights 1e-4 and 1e4": _held_out(partial(WeightedTask, weights=(1e-4, 1e4))),
    "blocks of 50 steps": _held_out(partial(InTurnsTask, block=50), blocks=True),
    "alternating losses": _held_out(partial(InTurnsTask, block=1)),
    "bad batches: 2% infinite gradients": _held_out(partial(ConsistencyTask, bad_share=0.02), bad_batches=True),
    "matrix factorization": _second(FactorizationTask),
    "triplets with a margin": _second(TripletTask),
    "focal loss, rare classes": _second(FocalTask),
    "graph convolution": _second(GraphTask),
    "GRU, sequence to sequence": _second(CopyTask, 600),
    "depthwise CNN, SGD, wrong labels": _second(NoisyLabelsTask),
    "masked autoencoder": _second(MaskedTask, 600),
    "normalizing flow": _second(FlowTask, 600),
    "Poisson, bad batches: 1% counts x 1000": _second(
        partial(PoissonTask, bad_share=0.01, bad_factor=1000.0), bad_batches=True
    ),
    "quantile regression": _second(QuantileTask),
    "score matching, blocks of 40 steps": _second(partial(ScoreTask, block=40), blocks=True),
    "Q-learning": _second(QLearningTask),
}
"""The tasks by name; the held-out ones last, in the order of their sets. Losses of fine-tuning are summed over
characters, so that a first scale is often too high."""
