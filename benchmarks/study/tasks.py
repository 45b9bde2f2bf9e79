"""The tasks of the study."""

from functools import partial

from benchmarks.study.adapters import AdapterTask
from benchmarks.study.adversarial import AdversarialTask
from benchmarks.study.classification import ConsistencyTask, DeepTask, DistillationTask
from benchmarks.study.contrastive import ContrastiveTask
from benchmarks.study.control import ControlTask
from benchmarks.study.distributions import FlowTask, PoissonTask, QuantileTask, ScoreTask
from benchmarks.study.equations import EquationTask
from benchmarks.study.experts import ExpertsTask
from benchmarks.study.generative import AutoencoderTask, DiffusionTask
from benchmarks.study.language import LENGTH, SEQUENCES, LanguageTask, Trouble, warmed_up
from benchmarks.study.preferences import PreferenceTask, RewardTask
from benchmarks.study.recurrent import RecurrentTask
from benchmarks.study.regression import HeavyTailTask, MixtureTask
from benchmarks.study.scenes import DetectionTask, SegmentationTask
from benchmarks.study.sequences import AccumulationTask, NewDataTask, TranscriptionTask, TranslationTask
from benchmarks.study.several_losses import InTurnsTask, WeightedTask
from benchmarks.study.sparse import FactorizationTask, FocalTask, TripletTask
from benchmarks.study.structured import CopyTask, GraphTask, MaskedTask, NoisyLabelsTask
from benchmarks.study.tables import ClicksTask, SalesTask
from benchmarks.study.task import TaskSpec
from benchmarks.study.transformer import STEPS, TransformerTask
from benchmarks.study.values import QLearningTask
from benchmarks.study.vision import VisionTask

SETS = {
    "tuned": "Tasks that the rule was tuned on",
    "held-out": "First held-out set, since tuned on",
    "held-out-2": "Second held-out set, since tuned on",
    "held-out-3": "Third held-out set: not tuned on",
}
"""The names of the sets of tasks and their headings; the position of a set is `TaskSpec.held_out` of its tasks."""

SUMMED = SEQUENCES * LENGTH
"""The loss factor of a loss that is summed over characters and not averaged."""


def _language(**trouble: object) -> partial[LanguageTask]:
    return partial(LanguageTask, trouble=Trouble(**trouble))  # type: ignore[arg-type]


_first = partial(TaskSpec, steps=1000, held_out=1)
_second = partial(TaskSpec, steps=800, held_out=2)
_third = partial(TaskSpec, steps=600, held_out=3)

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
    "LSTM, summed loss, bad batches: 0.5% x 300": _first(
        partial(RecurrentTask, bad_share=0.005, bad_factor=300.0), steps=600, bad_batches=True
    ),
    "VAE": _first(AutoencoderTask),
    "diffusion": _first(DiffusionTask),
    "contrastive": _first(ContrastiveTask),
    "ViT, cosine to 0": _first(TransformerTask, steps=STEPS),
    "distillation": _first(DistillationTask),
    "deep MLP without norm": _first(DeepTask),
    "low-rank adapters": _first(AdapterTask),
    "mixture density": _first(MixtureTask),
    "heavy-tailed regression": _first(HeavyTailTask),
    "loss weights 1e-4 and 1e4": _first(partial(WeightedTask, weights=(1e-4, 1e4))),
    "blocks of 50 steps": _first(partial(InTurnsTask, block=50), blocks=True),
    "alternating losses": _first(partial(InTurnsTask, block=1)),
    "bad batches: 2% infinite gradients": _first(partial(ConsistencyTask, bad_share=0.02), bad_batches=True),
    "matrix factorization": _second(FactorizationTask),
    "triplets with a margin": _second(TripletTask),
    "focal loss, rare classes": _second(FocalTask),
    "graph convolution": _second(GraphTask),
    "GRU, sequence to sequence": _second(CopyTask, steps=600),
    "depthwise CNN, SGD, wrong labels": _second(NoisyLabelsTask),
    "masked autoencoder": _second(MaskedTask, steps=600),
    "normalizing flow": _second(FlowTask, steps=600),
    "Poisson, bad batches: 1% counts x 1000": _second(
        partial(PoissonTask, bad_share=0.01, bad_factor=1000.0), bad_batches=True
    ),
    "quantile regression": _second(QuantileTask),
    "score matching, blocks of 40 steps": _second(partial(ScoreTask, block=40), blocks=True),
    "Q-learning": _second(QLearningTask),
    "encoder-decoder, label smoothing": _third(TranslationTask),
    "LoRA of a GPT, new data after 300 steps": _third(NewDataTask),
    "PPO": _third(RewardTask, steps=800),
    "DPO": _third(PreferenceTask),
    "mixture of experts": _third(ExpertsTask),
    "U-Net, dice loss, warm restarts": _third(SegmentationTask),
    "detection, bad batches: 0.5% pixels x 255": _third(partial(DetectionTask, bad_share=0.005), bad_batches=True),
    "CTC": _third(TranscriptionTask),
    "physics-informed network": _third(EquationTask, steps=800),
    "summed loss, 4 micro-batches": _third(AccumulationTask),
    "clicks, bad batches: 0.5% without logarithm": _third(
        partial(ClicksTask, bad_share=0.005), steps=800, bad_batches=True
    ),
    "sales, blocks of 50 steps": _third(partial(SalesTask, block=50), steps=800, blocks=True),
}
"""The tasks by name; the held-out ones last, in the order of their sets. Losses of fine-tuning are summed over
characters, so that a first scale is often too high."""
