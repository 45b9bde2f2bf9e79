"""`gradscale check-fp16`: what a cast to FP16 does to a checkpoint."""

import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from gradscale.cli import app
from gradscale.cli._checkpoint import DTYPES, TORCH_FILES, tensors_of
from gradscale.cli._survival import survival

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()} | {np.dtype(np.int64): "I64"}


def save(file: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """Writes a safetensors file, as its format is published: the length of a header, the header, the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, array in tensors.items():
        offsets = [begin, begin + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        begin += array.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values()))
    return file


def check(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check-fp16", *map(str, arguments)], env={"COLUMNS": "120"})


def weights(*values: float, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.array(values, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16])
def test_weights_that_fit_survive(dtype: Any, tmp_path: Path) -> None:
    found = check(save(tmp_path / "m.safetensors", {"a": weights(1.0, -0.5, 0.0, dtype=dtype)}))
    assert found.exit_code == 0
    assert "It survives: every weight" in found.output


def test_a_weight_above_the_largest_number_does_not() -> None:
    one = survival("a", weights(65519.0, 65520.0, 1e30, -7e4))
    assert (one.overflowed, one.fails, one.amax) == (3, True, pytest.approx(1e30))


def test_what_is_lost_is_counted_among_the_nonzero_weights() -> None:
    one = survival("a", weights(0.0, 0.0, 1.0, 2.0**-15, 2.0**-24, 2.0**-26, 1e-30))
    assert (one.nonzero, one.flushed, one.subnormal, one.overflowed) == (5, 2, 2, 0)
    assert (one.flushed_share, one.subnormal_share) == (0.4, 0.4)


@pytest.mark.parametrize(
    ("values", "risk"),
    [
        ([1.0, float("nan"), float("inf")], "2 inf or NaN already"),
        ([1.0, 1e5], "1 above 65504 become inf"),
        ([1.0, 3e4], "close to the largest"),
        ([1.0, 1e-9], "50.0% become zero"),
        ([1.0, 1e-6], "50.0% lose digits"),
        ([1.0, 0.0], ""),
    ],
)
def test_the_risk_of_a_tensor(values: list[float], risk: str) -> None:
    assert survival("a", weights(*values)).risk.startswith(risk)
    assert bool(survival("a", weights(*values)).risk) is bool(risk)


def test_only_tensors_at_risk_are_shown_unless_all_are_asked_for(tmp_path: Path) -> None:
    file = save(
        tmp_path / "m.safetensors", {"good": weights(1.0), "norm.weight": weights(1e5, dtype=ml_dtypes.bfloat16)}
    )
    found = check(file)
    assert found.exit_code == 1
    assert "norm.weight" in found.output
    assert "good" not in found.output
    assert "It does not survive: 1 tensor" in found.output
    assert "good" in check(file, "--all").output


def test_json_has_every_tensor(tmp_path: Path) -> None:
    file = save(tmp_path / "m.safetensors", {"a": weights(1.0, 1e-9), "ids": np.arange(3), "empty": weights()})
    found = json.loads(check(file, "--json").stdout)
    assert found["survives"] is True
    assert [one["name"] for one in found["tensors"]] == ["a", "empty"]
    assert (found["tensors"][0]["flushed_share"], found["tensors"][0]["risk"]) == (0.5, "50.0% become zero")


def test_the_parts_of_an_index_and_a_folder_are_read(tmp_path: Path) -> None:
    save(tmp_path / "part-1.safetensors", {"a": weights(1.0)})
    save(tmp_path / "part-2.safetensors", {"b": weights(1e5)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert [name for name, _ in tensors_of(str(index))] == ["a", "b"]
    assert [name for name, _ in tensors_of(str(tmp_path))] == ["a", "b"]


def test_a_file_of_safetensors_itself_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file({"a": weights(1.0, 2.0).reshape(1, 2), "b": np.arange(3)}, tmp_path / "m.safetensors")
    [(name, array)] = tensors_of(str(tmp_path / "m.safetensors"))
    assert (name, array.tolist()) == ("a", [[1.0, 2.0]])


def test_a_file_of_torch_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"model": {"w": torch.tensor([1e5], dtype=torch.bfloat16), "n": torch.arange(2)}, "step": 3}
    torch.save(state, tmp_path / "m.pt")
    found = check(tmp_path / "m.pt", "--json")
    assert found.exit_code == 1
    assert [one["name"] for one in json.loads(found.stdout)["tensors"]] == ["model.w"]


def sparse_and_complex(torch: Any) -> dict[str, Any]:
    large = torch.tensor([[0.0, 1e5], [1.0, 0.0]])
    return {
        "by coordinate": large.to_sparse(),
        "by row": large.to_sparse_csr(),
        "complex": torch.tensor([1 + 1e5j, 1e-9 + 0j]),
        "conjugate": torch.tensor([1 + 1e5j]).conj(),
        "complex128": torch.tensor([1e5j], dtype=torch.complex128),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_complex_tensors_of_torch_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = sparse_and_complex(torch)
    torch.save(tensors, tmp_path / "m.pt")
    found = json.loads(check(tmp_path / "m.pt", "--json").stdout)["tensors"]
    assert [(one["name"], one["overflowed"]) for one in found] == [(name, 1) for name in tensors]
    assert [one["nonzero"] for one in found] == [2, 2, 3, 2, 1]


def test_complex_tensors_of_safetensors_are_read(tmp_path: Path) -> None:
    tensors = {
        "a": np.array([[1 + 1e5j, 2j]], np.complex64),
        "scalar": np.array(1j, np.complex64),
        "empty": np.empty((0, 2), np.complex64),
    }
    found = json.loads(check(save(tmp_path / "m.safetensors", tensors), "--json").stdout)["tensors"]
    assert [(one["elements"], one["overflowed"]) for one in found] == [(4, 1), (2, 0), (0, 0)]


class Harmful:
    """Would write a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": Harmful(tmp_path / "touched")}, tmp_path / "m.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "touched")))
    for name in ("m.pt", "plain.bin"):
        found = check(tmp_path / name)
        assert found.exit_code == 2
        output = " ".join(found.output.split())
        assert "cannot be loaded as weights only, since no pickled code is run: it " in output
        assert "Save the weights alone: `torch.save(model.state_dict(), path)`" in output
        assert "weights_only` set to `False`" not in output  # torch's own advice
    assert not (tmp_path / "touched").exists()


def test_a_file_with_other_objects_says_which(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    output = " ".join(check(tmp_path / "m.pt").output.split())
    assert "it holds torch.nn.modules.linear.Linear, which is no tensor" in output


def test_the_state_of_an_optimizer_is_left_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    moments = {"state": {0: {"exp_avg_sq": torch.tensor([1e-12])}}}
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": moments, "optimizer_states": [moments]}, tmp_path / "m.pt")
    assert [name for name, _ in tensors_of(str(tmp_path / "m.pt"))] == ["model.w"]


def broken(tmp_path: Path, name: str) -> Path:
    file = tmp_path / "m.safetensors"
    whole = save(file, {"a": weights(1.0, 2.0)}).read_bytes()
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    infinite = header.replace(b"[2]", b"[1e999]")
    deep = b"[" * 100_000
    contents = {
        "empty": b"",
        "cut short": whole[:-4],
        "not JSON": (4).to_bytes(8, "little") + b"nope" + whole,
        "a list": (2).to_bytes(8, "little") + b"[]" + whole,
        "a wrong size": len(header).to_bytes(8, "little") + header + bytes(8),
        "an infinite size": len(infinite).to_bytes(8, "little") + infinite + bytes(8),
        "nested deeply": len(deep).to_bytes(8, "little") + deep,
    }
    file.write_bytes(contents[name])
    return file


@pytest.mark.parametrize(
    "name", ["empty", "cut short", "not JSON", "a list", "a wrong size", "an infinite size", "nested deeply"]
)
def test_a_broken_file_is_one_line(name: str, tmp_path: Path) -> None:
    found = check(broken(tmp_path, name))
    assert found.exit_code == 2
    assert found.output.startswith("Error: ")
    assert found.output.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "says"), [("missing.safetensors", "No such file"), ("missing.pt", "No such file"), ("m.txt", "must be a")]
)
def test_a_file_that_cannot_be_read_is_one_line(name: str, says: str, tmp_path: Path) -> None:
    found = check(tmp_path / name)
    assert found.exit_code == 2
    assert says in found.output
    assert found.output.count("\n") == 1


def test_names_in_an_index_stay_in_its_folder(tmp_path: Path) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "a name is a path" in check(index).output


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": "m.index.json"}}', '{"weight_map": {"a": ".."}}', "[" * 100_000]
)
def test_an_index_that_leads_nowhere_is_one_line(text: str, tmp_path: Path) -> None:
    index = tmp_path / "m.index.json"
    index.write_text(text)
    found = check(index)
    assert found.exit_code == 2
    assert "m.index.json is not the index of a checkpoint" in found.output
    assert found.output.count("\n") == 1


def unusual(torch: Any) -> dict[str, tuple[Any, int]]:
    """Returns tensors of torch that few files have, with how many numbers each holds."""
    trillion = torch.zeros(1, 1, dtype=torch.int64).expand(1, 10**12), torch.zeros(1).expand(10**12)
    return {
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 5),
        "negated": (torch._neg_view(torch.ones(3)), 3),
        "expanded": (torch.zeros(2, 1).expand(2, 10**12), 2),
        "expanded BF16": (torch.zeros(1, dtype=torch.bfloat16).expand(10**12), 1),
        "expanded complex": (torch.zeros(1, dtype=torch.complex64).expand(10**12), 2),
        "sparse, expanded": (torch.sparse_coo_tensor(*trillion, (1,), check_invariants=False), 1),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_of_tensors_that_are_views_the_memory_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, (tensor, numbers) in unusual(torch).items():
        torch.save({name: tensor}, tmp_path / "m.pt")
        found = check(tmp_path / "m.pt", "--json")
        assert found.exit_code == 0, found.output
        assert [(one["name"], one["elements"]) for one in json.loads(found.stdout)["tensors"]] == [(name, numbers)]


def test_overlapping_tensors_of_safetensors_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}
    text = json.dumps({f"w{number}": entry for number in range(9)}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4096))
    found = check(tmp_path / "m.safetensors")
    assert found.exit_code == 2
    assert "its tensors overlap" in found.output


@pytest.mark.parametrize("kind", ["meta", "overlapping"])
def test_tensors_that_cannot_be_read_are_an_error_and_no_verdict(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    memory = torch.ones(10_000)
    tensors, says = {
        "meta": ({"w": torch.ones(2, device="meta")}, "w cannot be read"),
        "overlapping": ({f"w{start}": memory[start:] for start in range(200)}, "views of the same numbers, 100 times"),
    }[kind]
    torch.save(tensors, tmp_path / "m.pt")
    found = check(tmp_path / "m.pt")
    assert found.exit_code == 2
    assert says in found.output
    assert found.output.count("\n") == 1


def test_a_file_that_contains_itself_is_one_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    held: dict[str, Any] = {"w": torch.ones(2)}
    held["held"] = held
    torch.save(held, tmp_path / "m.pt")
    found = check(tmp_path / "m.pt")
    assert found.exit_code == 2
    assert "nested too deeply, or contains itself" in found.output
    assert found.output.count("\n") == 1


@pytest.mark.parametrize("ending", TORCH_FILES)
def test_a_folder_with_one_file_of_torch_is_read(ending: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / f"last{ending}")
    assert [name for name, _ in tensors_of(str(tmp_path))] == ["w"]


def test_a_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    found = check(save(tmp_path / "m.safetensors", {"a\x1b[2J[bold]": weights(1e6)}))
    assert "a\\x1b[2J[bold]" in found.output
    assert "\x1b" not in found.output


def test_a_folder_with_several_or_no_checkpoints_is_refused(tmp_path: Path) -> None:
    assert "no checkpoint" in check(tmp_path).output
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", {"a": weights(1.0)})
    assert "several checkpoints" in check(tmp_path).output
