"""The tasks of the study."""

from functools import partial

from benchmarks.study.adversarial import AdversarialTask
from benchmarks.study.control import ControlTask
from benchmarks.study.language import LENGTH, SEQUENCES, LanguageTask, Trouble, warmed_up
from benchmarks.study.task import TaskSpec
from benchmarks.study.vision import VisionTask

SUMMED = SEQUENCES * LENGTH
"""The loss factor of a loss that is summed over characters and not averaged."""


def _language(**trouble: object) -> partial[LanguageTask]:
    return partial(LanguageTask, trouble=Trouble(**trouble))  # type: ignore[arg-type]


_char_gpt = _language()
_fine_tuning = partial(warmed_up, trouble=Trouble(loss_factor=SUMMED, warm_steps=200))

TASKS: dict[str, TaskSpec] = {
    "char-GPT": TaskSpec(_char_gpt),
    "GAN": TaskSpec(AdversarialTask),
    "policy gradient": TaskSpec(ControlTask),
    "learning-rate spike": TaskSpec(_language(hot_steps=(500, 520))),
    "bad batches: 1% x 100": TaskSpec(_language(bad_share=0.01)),
    "tiny: loss x 1e-7": TaskSpec(_language(loss_factor=1e-7)),
    "start at 2^32": TaskSpec(_char_gpt, init_scale=2.0**32),
    "deep CNN": TaskSpec(VisionTask),
    "CNN, bad batches: 1% x 100": TaskSpec(partial(VisionTask, bad_share=0.01)),
    "fine-tuning, 3 steps": TaskSpec(_fine_tuning, steps=3),
    "fine-tuning, 10 steps": TaskSpec(_fine_tuning, steps=10),
    "fine-tuning, 50 steps": TaskSpec(_fine_tuning, steps=50),
}
"""The tasks by name. Losses of fine-tuning are summed over characters, so that a first scale is often too high."""
