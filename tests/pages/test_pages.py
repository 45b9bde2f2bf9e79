"""The code of README and of every page runs as it stands; that of Keras and MXNet in their own tests."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.pages.pages import ROOT, blocks, pages_with, run_page

FRAMEWORK = re.compile(
    r"^[> ]*(?:import|from) (?:gradscale\.(?:integrations\.)?)?"
    r"(torch|jax|optax|flax|jmp|lightning|accelerate|transformers)\b",
    re.MULTILINE,
)
ON_TORCH = {"torch", "lightning", "accelerate", "transformers"}


def a_training_script(folder: Path) -> dict[str, Any]:
    """Returns the names that the pages take for granted."""
    import torch

    nn = torch.nn
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "device": "cpu", "path": folder / "run.pt"}
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    generator, critic, encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 3), nn.Linear(3, 4)
    names |= {"model": model, "generator": generator, "critic": critic}
    for name, module in (("", model), ("generator_", generator), ("critic_", critic), ("encoder_", encoder)):
        names[f"{name}optimizer"] = torch.optim.Adam(module.parameters(), fused=True)
    names["decoder_optimizer"] = torch.optim.SGD(decoder.parameters(), lr=0.1)
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], step_size=2)
    names["ema"] = torch.optim.swa_utils.AveragedModel(model)
    x, y, noise = torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 3)
    code = encoder(x)
    names |= {
        "loader": [(x, y)] * 2,
        "batch": x,
        "batches": [x] * 2,
        "micro_batches": [x, x],
        "inputs": x.clone().requires_grad_(),
        "targets": y,
        "loss_fn": nn.functional.mse_loss,
        "loss_of": lambda batch: nn.functional.mse_loss(model(batch), y),
        "loss_a": code.square().mean(),
        "loss_b": decoder(code).square().mean(),
        "critic_loss": lambda critic, generator: critic(generator(noise).detach()).mean() - critic(x).mean(),
        "generator_loss": lambda critic, generator: -critic(generator(noise)).mean(),
        "stage_module": nn.Linear(4, 2),
    }
    return names


@contextmanager
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets what `torchrun` does for the only rank there is, and ends the process group if the page has not."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    import torch.distributed as dist
    from tests.torch.process_group import end_process_group

    try:
        yield
    finally:
        if dist.is_initialized():
            end_process_group()


def forget_accelerators() -> None:
    """Accelerate keeps its state in classes, so one page would see what another has set."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")  # Transformers
@pytest.mark.filterwarnings("ignore:.*tensorboard:UserWarning")  # Lightning, of a logger that is not installed
@pytest.mark.parametrize("page", pages_with(None))
def test_the_code_on_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(block.code for block in blocks(ROOT / page))
    frameworks = set(FRAMEWORK.findall(code))
    for framework in frameworks:
        pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    with one_rank(monkeypatch) if "init_process_group" in code else nullcontext():
        run_page(page, a_training_script(tmp_path) if frameworks & ON_TORCH else None)
    if "accelerate" in sys.modules:
        forget_accelerators()
