"""The calls that libraries make of a scaler, in their order: with the drop-in they give what they give with torch's.

Written after the sources at the commits that are named; the libraries are not installed.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.drop_in.helpers import OURS, TORCH, batches, linear_pair
from tests.torch.helpers import INF, same
from tests.torch.ranks.launch import run_ranks
from torch import Tensor, nn

Step = Callable[[Tensor], Any]
"""Takes a loss, and does all that a library does with it."""

STEPS, BAD = 6, 2


class Cancelled(Exception):
    """Ends a step early, as fastai's callbacks do."""


class Fastai:
    """fastai (fastai/callback/fp16.py, 00a6a6a and later): the callback passes itself off as the optimizer.

    The scaler divides the gradients and calls its `step`, which notes that; the real optimizer is stepped afterwards.
    An attribute that it does not have is looked up in the learner.
    """

    def __init__(self, scaler: Any, model: nn.Module, optimizer: Any) -> None:
        self.learn = SimpleNamespace(scaler=scaler, opt=optimizer, model=model)
        self.skipped, self.scales = False, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["learn"], name)

    @property
    def param_groups(self) -> Any:
        return self.opt.param_groups

    def step(self, *_: Any, **__: Any) -> None:
        self.skipped = False

    def before_step(self) -> None:
        self.skipped = True
        self.scaler.step(self)
        if self.skipped:
            raise Cancelled
        self.scales.append(self.scaler.get_scale())

    def __call__(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        try:
            self.before_step()
            self.opt.step()
        except Cancelled:
            pass
        self.scaler.update()  # `after_step`, which comes after a cancelled step too
        self.opt.zero_grad()


def mmengine(scaler: Any, model: nn.Module, optimizer: Any, scale: float | None = 512.0) -> Step:
    """mmengine (mmengine/optim/optimizer/amp_optimizer_wrapper.py, 0200622): a float sets the scale at every update."""

    def step(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update(scale)
        optimizer.zero_grad()

    return step


def timm(scaler: Any, model: nn.Module, optimizer: Any) -> Step:
    """timm's `NativeScaler` (timm/utils/cuda.py, 089d904): an object that is called with everything."""

    def step(loss: Tensor) -> None:
        scaler.scale(loss).backward(create_graph=False)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        # Its state is saved by the object that holds it.
        scaler.load_state_dict(scaler.state_dict())

    return step


def ignite(scaler: Any, model: nn.Module, optimizer: Any) -> Step:
    """Ignite's `create_supervised_trainer(scaler=...)`, with accumulation: told from True and False by its type."""
    assert scaler
    assert not isinstance(scaler, bool)
    iteration = 0

    def step(loss: Tensor) -> None:
        nonlocal iteration
        if iteration % 2 == 0:
            optimizer.zero_grad()
        iteration += 1
        scaler.scale(loss / 2).backward()
        if iteration % 2 == 0:
            scaler.step(optimizer)
            scaler.update()

    return step


def ultralytics(scaler: Any, model: nn.Module, optimizer: Any) -> Step:
    """Ultralytics' `optimizer_step` (engine/trainer.py, 8.x), on a trainer whose `scaler` is replaced."""
    ema = torch.optim.swa_utils.AveragedModel(model)
    trainer = SimpleNamespace(scaler=scaler, optimizer=optimizer, model=model, ema=ema)

    def step(loss: Tensor) -> None:
        trainer.scaler.scale(loss).backward()
        trainer.scaler.unscale_(trainer.optimizer)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), max_norm=10.0)
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()
        trainer.optimizer.zero_grad()
        trainer.ema.update_parameters(trainer.model)

    return step


def monai(scaler: Any, model: nn.Module, optimizer: Any) -> Step:
    """MONAI's `SupervisedTrainer` (monai/engines/trainer.py, 0161bf0): `scaler` is None without AMP."""
    engine = SimpleNamespace(amp=True, scaler=scaler, optimizer=optimizer)

    def step(loss: Tensor) -> None:
        engine.optimizer.zero_grad()
        if engine.amp and engine.scaler is not None:
            engine.scaler.scale(loss).backward()
            engine.scaler.step(engine.optimizer)
            engine.scaler.update()

    return step


def speechbrain(scaler: Any, model: nn.Module, optimizer: Any) -> Step:
    """SpeechBrain's `fit_batch` of recipes: a loss that is not finite is not stepped on, and the scale updated."""

    def step(loss: Tensor) -> None:
        scaler.scale(loss / 1).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if torch.isfinite(loss):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


LIBRARIES: dict[str, Callable[..., Step]] = {
    "fastai": Fastai,
    "mmengine": mmengine,
    "timm": timm,
    "ignite": ignite,
    "ultralytics": ultralytics,
    "monai": monai,
    "speechbrain": speechbrain,
}
BY_GRADIENT: list[tuple[str, str]] = [(name, "gradient") for name in LIBRARIES]
CASES = [*BY_GRADIENT, ("speechbrain", "loss"), ("fastai", "loss")]


def trained(library: str, kind: Any, bad: str) -> tuple[list[Tensor], list[float]]:
    """Returns the weights after some steps, of which one overflows, and the scales after each."""
    model: Any = linear_pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=2.0**10, growth_interval=2)
    step, scales = LIBRARIES[library](scaler, model, optimizer), []
    for number, (x, y) in enumerate(batches(STEPS)):
        loss = (model(x) - y).square().mean()
        if number == BAD:
            # One whose gradient is inf and whose value is not, or an infinite loss.
            loss = loss + (model[0].weight[0, 0] * 0).sqrt() if bad == "gradient" else loss * INF
        step(loss)
        scales.append(scaler.get_scale())
    return [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())], scales


@pytest.mark.parametrize(("library", "bad"), CASES)
def test_calls_of_a_library_give_the_weights_and_scales_of_torchs_scaler(library: str, bad: str) -> None:
    ours, theirs = trained(library, OURS, bad), trained(library, TORCH, bad)
    assert same(ours[0], theirs[0])
    assert all(bool(tensor.isfinite().all()) for tensor in ours[0])
    assert ours[1] == theirs[1]
    assert set(ours[1]) == {512.0} if library == "mmengine" else min(ours[1]) < max(ours[1])


def reduced_by_nanochat(kind: str) -> Any:
    """nanochat (scripts/base_train.py): each rank checks its own gradients, and the flags are reduced by hand."""
    owner = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([owner], lr=0.5)
    scaler = (OURS if kind == "ours" else TORCH)("cpu", init_scale=8.0)
    found = []
    for step in range(3):
        scaler.scale(owner.sum()).backward()
        if step == 1 and dist.get_rank() == 1:
            owner.grad[0] = INF  # type: ignore[index]
        scaler.unscale_(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        found.append((owner.tolist(), scaler.get_scale()))
    return found


@pytest.mark.cpu_only("gloo, which has no other device")
def test_flags_that_nanochat_reduces_over_ranks_skip_the_step_on_all_of_them(tmp_path: Path) -> None:
    expected = [([0.5] * 3, 8.0), ([0.5] * 3, 4.0), ([0.0] * 3, 4.0)]
    for kind in ("theirs", "ours"):
        (tmp_path / kind).mkdir()
        assert run_ranks(2, reduced_by_nanochat, kind, folder=tmp_path / kind) == [expected, expected]


def test_hooks_of_speechbrains_checkpointer_must_be_registered_for_the_drop_in() -> None:
    # It looks for the nearest class that has a hook (speechbrain/utils/checkpoints.py, 00fed89), and has none for
    # `torch.amp.GradScaler`, which is what torch's own page recommends.
    hooks: dict[type, str] = {torch.cuda.amp.grad_scaler.GradScaler: "torch_save"}

    def hook_of(scaler: Any) -> str | None:
        return next((hooks[kind] for kind in inspect.getmro(type(scaler)) if kind in hooks), None)

    assert [hook_of(kind("cpu")) for kind in (OURS, TORCH)] == [None, None]
    hooks[torch.amp.GradScaler] = "torch_save"
    assert [hook_of(kind("cpu")) for kind in (OURS, TORCH)] == ["torch_save"] * 2
