"""The code on the PyTorch pages runs as it stands, from top to bottom."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "use"

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def a_training_script(folder: Path) -> dict[str, Any]:
    """Returns the names that the pages take for granted."""
    torch = pytest.importorskip("torch")
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
    }
    return names


@pytest.mark.parametrize(
    "page", ["torch.md", "troubleshooting.md", "precision.md", "masters.md", "casts.md", "emulate.md", "qat.md"]
)
def test_the_code_on_the_page_runs(page: str, tmp_path: Path) -> None:
    names = a_training_script(tmp_path)
    text = (DOCS / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + dedent(block[2]), str(DOCS / page), "exec"), names)
