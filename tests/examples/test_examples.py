"""Every example runs as it stands, warns of nothing, and learns."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.examples.run import EXAMPLES as FOLDER
from tests.examples.run import RANKS, lines_printed

EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "char_gpt.py", FOLDER / "rl_policy.py"})
"""All programs, without the models that those on many ranks, and that of reinforcement learning, import."""

SLOW = {
    "accelerate_loop",
    "jax_equinox_gpt",
    "jax_many_devices",
    "jax_nnx_cnn",
    "jax_scaled_optax",
    "jax_watch",
    "keras_custom_loop_jax",
    "keras_custom_loop_tf",
    "keras_custom_loop_torch",
    "keras_fit",
    "keras_watch",
    "lightning_fabric",
    "torch_ddp",
    "torch_fsdp2",
    "torch_fsdp2_tp",
    "torch_gan",
    "torch_pipeline",
    "torch_qat_int8",
    "torch_rl_fp16",
    "transformers_trainer",
}

LONGEST = {"loss_scaling_in_200_lines": 200, "torch_qat_int8": 84}
"""Most lines of examples that are longer than a screen."""

CLOSING = re.compile(r"(?P<before>[\d.]+) -> (?P<after>[\d.]+)\b.*, skipped (?P<skipped>\d+) of (?P<steps>\d+)")
"""How the last line of every example ends: what was learned, and what became of the steps."""


def needed(name: str) -> list[str]:
    """Returns the packages of an example: its framework, by which its name begins, and of Keras the backend too."""
    if name.startswith("loss_scaling"):
        return ["torch"]
    framework, _, rest = name.partition("_")
    backends = {"tf": "tensorflow", "jax": "jax", "torch": "torch"}
    return [framework, *(backends[word] for word in rest.split("_") if framework == "keras" and word in backends)]


def check_closing(line: str) -> None:
    """Fails unless the last line of an example says that it has learned, and skipped few steps."""
    closing = CLOSING.search(line)
    assert closing is not None, line
    assert float(closing["after"]) < 0.5 * float(closing["before"])
    assert int(closing["skipped"]) < 0.1 * int(closing["steps"])


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12


def marked(names: Iterable[str]) -> list[Any]:
    """Returns the names as parameters of a test, with a mark where the example takes long."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in names]


@pytest.mark.parametrize("name", marked(path.stem for path in EXAMPLES if path.stem not in RANKS))
def test_the_example_learns_and_seldom_skips(name: str) -> None:
    if missing := [package for package in needed(name) if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    check_closing(lines_printed(name)[-1])


@pytest.mark.parametrize("name", marked(RANKS))
def test_the_ranks_of_the_example_skip_together_and_learn(name: str) -> None:
    pytest.importorskip("torch")
    lines = lines_printed(name)
    # The example raises if ranks end with other weights, as they would if not all of them had skipped this step.
    assert lines[0].endswith(", overflow")
    check_closing(lines[-1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_fits_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST.get(path.stem, 75)
