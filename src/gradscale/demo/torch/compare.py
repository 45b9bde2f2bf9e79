"""The comparison: each model, trained six ways."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from gradscale.demo.digits import load_digits
from gradscale.demo.run import FP8_WAYS, WAYS, Comparison, Demo, Run, Tick
from gradscale.demo.torch.cnn import DigitsTask
from gradscale.demo.torch.language import LanguageTask
from gradscale.demo.torch.task import Task
from gradscale.demo.torch.text import load_text
from gradscale.demo.torch.train import Way, in_fp8, in_fp16, in_fp32, train
from gradscale.demo.torch.workers import Workers
from gradscale.formats import FP8_E5M2, FP16
from gradscale.histogram import best_static_scale
from gradscale.policies.headroom import Headroom
from gradscale.policies.static import NoScaling, Static

TASKS: dict[str, Callable[[int, torch.device], Task]] = {
    DigitsTask.subject.model: lambda seed, device: DigitsTask(load_digits(seed), device),
    LanguageTask.subject.model: lambda _, device: LanguageTask(load_text(), device),
}


def compare(plan: Mapping[str, int], seed: int, tick: Tick) -> list[Comparison]:
    """Returns a comparison for each model.

    The static scale is the best that the exponents of the FP32 run's own gradients allow; the dynamic one is what
    `LossScaler` does unless told otherwise. An unscaled run has the scale 1 and is checked for overflow like the
    others, so that all it can suffer from is underflow. The same two are then run in emulated FP8.

    Args:
        plan: the models, and how many steps each run has.
        seed: of the start and the batches.
        tick: called with the names of the model and the way after each step.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks = [TASKS[model](seed, device) for model in plan]
    full, unscaled, static, dynamic = WAYS
    fp8_unscaled, fp8_dynamic = FP8_WAYS
    with Workers(device) as workers:

        def begin(task: Task, way: Way) -> Future[Run]:
            return _begin(workers, task, way, seed, plan[task.subject.model], tick)

        at_once = (
            Way(full, NoScaling(), in_fp32),
            Way(unscaled, Static(1.0), in_fp16),
            Way(dynamic, "auto", in_fp16),
            Way(fp8_unscaled, Static(1.0), in_fp8),
            Way(fp8_dynamic, Headroom(format=FP8_E5M2), in_fp8),
        )
        runs = {way.name: [begin(task, way) for task in tasks] for way in at_once}
        scales = [best_static_scale(run.result().histogram, FP16) for run in runs[full]]
        runs[static] = [
            begin(task, Way(static, Static(scale), in_fp16)) for task, scale in zip(tasks, scales, strict=True)
        ]
        return [
            Comparison(task.subject, [runs[way][place].result() for way in DEMO.ways])
            for place, task in enumerate(tasks)
        ]


def _begin(workers: Workers, task: Task, way: Way, seed: int, steps: int, tick: Tick) -> "Future[Run]":
    """Queues a run. Its model is made here and now: threads share torch's random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.model()

    def told() -> None:
        workers.check()
        tick(task.subject.model, way.name)

    return workers.submit(lambda: train(way, task, model, seed, steps, told))


DEMO = Demo(
    ways=WAYS + FP8_WAYS,
    steps={DigitsTask.subject.model: 400, LanguageTask.subject.model: 300},
    compare=compare,
)
