"""`explain`: what it reports of models, optimizers and scalers, and what it warns of."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch.helpers import autocast
from tests.torch.precision.models import Net, loss_of
from torch import Tensor, nn

from gradscale import NoScaling, Static
from gradscale.torch import O1, O2, GradScaler, LossScaler, Precision, explain, prepare
from gradscale.torch.precision.explain import LIKE_INPUT, Explanation, module_rows

HALF, FLOAT = torch.float16, torch.float32


def explained(precision: Any, model: Any = None) -> Explanation:
    model = Net() if model is None else model
    return explain(*prepare(model, torch.optim.AdamW(model.parameters(), eps=1e-4), precision))


def explained_as_o3_with_adam() -> Explanation:
    """Built by hand: `prepare` refuses the default `eps` of Adam."""
    model, _, scaler = prepare(Net(), None, "O3")
    return explain(model, torch.optim.AdamW(model.parameters()), scaler)


def computes_in(explanation: Explanation) -> dict[str, str]:
    return {row.name: row.compute_dtype for row in explanation.modules}


@pytest.mark.parametrize(
    ("precision", "weights", "half", "norm"),
    [
        ("O0", "float32", "float32", "float32"),
        ("O1", "float32", "float16", "float32"),
        ("O1-bf16", "float32", "bfloat16", "float32"),
        ("O2", "float16", "float16", "float32"),
        ("O3", "float16", "float16", "float16"),
        ("O2-bf16", "bfloat16", "bfloat16", "float32"),
    ],
)
def test_modules_are_reported_with_their_dtypes(precision: str, weights: str, half: str, norm: str) -> None:
    explanation = explained(precision)
    assert {row.name: row.weights for row in explanation.modules}["conv"] == weights
    assert computes_in(explanation)["conv"] == computes_in(explanation)["head"] == half
    assert computes_in(explanation)["body.1"] == norm


@pytest.mark.parametrize("precision", [O1, O2])
def test_kept_modules_run_in_float32_with_all_inside_them(precision: Precision) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    found = computes_in(explained(replace(precision, keep_fp32=("0",)), model))
    assert found == {"0": "float32", "0.0": "float32", "0.1": "float32", "1": "float16"}


def test_buffers_are_reported() -> None:
    buffers = {row.name: row.buffers for row in explained("O2").modules}
    assert buffers["norms.0"] == "float32 and int64"
    assert buffers[""] == "float16 and int64"


def test_modules_of_one_kind_share_a_row() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)))
    rows = explain(model).modules
    assert [(row.name, row.count, row.kind, row.elements) for row in rows] == [
        ("*.0", 3, "Linear", 60),
        ("*.1", 3, "LayerNorm", 24),
    ]


AUTOCAST: list[tuple[nn.Module, tuple[Any, ...], str]] = [
    (nn.Linear(8, 8), (torch.randn(2, 8),), "float16"),
    (nn.Conv1d(8, 8, 1), (torch.randn(2, 8, 3),), "float16"),
    (nn.ConvTranspose2d(2, 2, 1), (torch.randn(2, 2, 3, 3),), "float16"),
    (nn.MultiheadAttention(8, 2), (torch.randn(3, 2, 8),) * 3, "float16"),
    (nn.PReLU(), (torch.randn(2, 8),), "float16"),
    (nn.Embedding(4, 8), (torch.arange(4),), "float32"),
    (nn.BatchNorm1d(8), (torch.randn(2, 8),), LIKE_INPUT),
    (nn.LayerNorm(8), (torch.randn(2, 8),), LIKE_INPUT),
    (nn.GroupNorm(2, 8), (torch.randn(2, 8),), LIKE_INPUT),
    (nn.Bilinear(2, 2, 2), (torch.randn(2, 2), torch.randn(2, 2)), LIKE_INPUT),
]


@pytest.mark.cpu_only("the lists of the CPU's autocast")
@pytest.mark.parametrize(("module", "inputs", "reported"), AUTOCAST, ids=lambda value: type(value).__name__)
def test_what_is_reported_of_autocast_is_what_it_does_on_a_cpu(
    module: nn.Module, inputs: tuple[Any, ...], reported: str
) -> None:
    with autocast(dtype=HALF):
        assert next(row.compute_dtype for _, row in module_rows(module)) == reported
        found = module(*inputs)
    while isinstance(found, tuple):
        found = found[0]
    assert found.dtype is (HALF if reported == "float16" else FLOAT)


@pytest.mark.not_simulated("recurrent layers")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_layers_compute_products_in_half_under_autocast_whatever_they_return(kind: type[nn.Module]) -> None:
    module, inputs = kind(8, 8), torch.randn(2, 8)
    with autocast(dtype=HALF):
        reported = explain(module)
        found = module(inputs)[0].float()
    assert reported.modules[0].compute_dtype == "float16"
    assert reported.scaling.startswith("needed")
    assert not torch.equal(found, module(inputs)[0])


@pytest.mark.parametrize(
    "operation", ["layer_norm", "group_norm", "rms_norm", "softmax.int", "log_softmax.int", "softplus"]
)
def test_autocast_has_rules_of_its_own_on_accelerators(operation: str) -> None:
    def has_rule(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", key)

    assert has_rule("AutocastCUDA") or operation == "rms_norm"  # newer than the others: `explain` asks torch for it
    assert not has_rule("AutocastCPU")


def test_a_custom_loop_is_explained_inside_its_autocast_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert explain(model).modules[0].compute_dtype == "float32"
    with autocast(dtype=torch.bfloat16):
        assert explain(model).modules[0].compute_dtype == "bfloat16"


@pytest.mark.parametrize("storage", ["fp32", "remainder", "kahan", "stochastic"])
def test_optimizers_are_reported_with_their_masters(storage: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    assert explain(model, optimizer).optimizers == ("AdamW",)
    explanation = explain(*prepare(model, optimizer, replace(O2, master_weights=storage)))
    assert explanation.optimizers == (f"MasterWeights(AdamW, {storage!r})",)


@pytest.mark.parametrize(
    ("precision", "start"),
    [
        ("O0", "not needed. Everything"),
        ("O1", "needed."),
        ("O3", "needed."),
        ("bf16", "not needed. BF16 has the range"),
    ],
)
def test_whether_a_scaler_is_needed_is_reported_with_the_reason(precision: str, start: str) -> None:
    assert explained(precision).scaling.startswith(start)


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O1-bf16", "O2-bf16"])
def test_nothing_is_wrong_with_what_prepare_makes(precision: str) -> None:
    assert explained(precision).warnings == ()


def test_o3_is_warned_of_in_two_ways() -> None:
    found = explained_as_o3_with_adam().warnings
    assert len(found) == 2
    assert "5 norm layers store weights or statistics in half precision, such as 'norms.0'" in found[0]
    assert "AdamW updates 17 half-precision parameters with no master weights" in found[1]


def test_half_statistics_of_norms_without_trained_weights_are_warned_of() -> None:
    for norm in (
        nn.BatchNorm1d(4, affine=False).half(),
        nn.InstanceNorm1d(4, track_running_stats=True).bfloat16(),
        nn.BatchNorm1d(4).half().requires_grad_(False),
    ):
        model = nn.Sequential(nn.Linear(4, 4), norm)
        (found,) = (warning for warning in explain(model).warnings if "norm" in warning)
        assert found.startswith("1 norm layers store weights or statistics in half precision, such as '1'")
        model.eval()  # nothing changes them
        assert not any("norm" in warning for warning in explain(model).warnings)


def test_norms_with_float32_statistics_or_none_are_not_warned_of() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False).half())
    assert explain(model).warnings == ()


NO_SCALERS = [None, LossScaler(policy=NoScaling()), torch.amp.GradScaler("cpu", enabled=False)]
SCALERS = [LossScaler(), LossScaler(policy=Static(8.0)), GradScaler("cpu"), torch.amp.GradScaler("cpu")]


@pytest.mark.parametrize("scaler", NO_SCALERS, ids=["none", "no scaling", "disabled"])
def test_fp16_without_a_scaler_is_warned_of(scaler: Any) -> None:
    model, optimizer, _ = prepare(*_pair(), "O1")
    (found,) = explain(model, optimizer, scaler).warnings
    assert found.startswith("FP16 runs with no scaler: small gradients vanish")
    assert explain(*_pair(), scaler).warnings == ()


@pytest.mark.parametrize("scaler", SCALERS, ids=["auto", "static", "drop-in", "torch"])
@pytest.mark.parametrize("precision", ["O0", "bf16"])
def test_a_scaler_for_nothing_is_warned_of(precision: str, scaler: Any) -> None:
    model, optimizer, _ = prepare(*_pair(), precision)
    (found,) = explain(model, optimizer, scaler).warnings
    assert found.startswith("A scaler runs for nothing")
    model, optimizer, _ = prepare(*_pair(), "O1")
    assert explain(model, optimizer, scaler).warnings == ()


def _pair() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters())


def test_frozen_half_weights_lose_no_updates() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2))
    assert explain(model, torch.optim.SGD(model.parameters()), LossScaler(model)).warnings == ()


def test_warnings_are_emitted_where_that_is_asked_for() -> None:
    model = nn.Linear(2, 2).half()
    with pytest.warns(UserWarning, match="FP16 runs with no scaler") as caught:
        explain(model, warn=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain(model)


def test_the_table_shows_all_of_it() -> None:
    text = str(explained_as_o3_with_adam())
    assert text.split()[:2] == ["module", "class"]
    assert "(the model itself)" in text
    assert "Optimizer: AdamW" in text.splitlines()
    assert "Scaler: needed." in text
    assert text.count("Warning: ") == 2
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_names_are_shown_as_they_are() -> None:
    model = nn.Sequential()
    model.add_module("[bold]", nn.Linear(2, 2))
    assert "[bold]" in str(explain(model))


def test_explaining_changes_nothing() -> None:
    model, optimizer, scaler = prepare(*_pair(), "O2")
    before = [value.clone() for value in model.state_dict().values()]
    str(explain(model, optimizer, scaler))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))
    assert isinstance(model(torch.ones(1, 2)), Tensor)


def test_several_models_and_optimizers_are_explained_together() -> None:
    models, optimizers, scaler = prepare(*map(list, zip(_pair(), _pair(), strict=True)), "O1")  # type: ignore[misc]
    explanation = explain(models, optimizers, scaler)
    assert len(explanation.optimizers) == 2
    assert sum(row.count for row in explanation.modules) == 2


def test_what_is_reported_of_a_prepared_model_is_what_runs() -> None:
    model, _, _ = prepare(net := Net(), torch.optim.SGD(net.parameters()), "O2")
    reported, found = {row.name: row.compute_dtype for _, row in module_rows(model) if row.name}, {}
    for name, part in model.named_modules():
        for own in part.parameters(recurse=False):
            own.register_hook(lambda grad, name=name: found.__setitem__(name, str(grad.dtype).removeprefix("torch.")))
    loss_of(model).backward()
    assert found == reported
