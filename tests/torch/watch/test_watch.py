"""`watch`: what it records, at which steps, and that nothing is left on the model between them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale import FP16, Dynamic, Static
from gradscale.histogram import exponent_histogram, losses
from gradscale.torch import GradScaler, LossScaler, Watch, watch
from gradscale.watching import WatchRow


def model_of(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def batch() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def hooks_on(model: nn.Module) -> int:
    on_modules = sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())
    on_parameters = sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())
    return on_modules + on_parameters


def train(model: nn.Module, scaler: LossScaler, steps: int, each: Callable[[int], object] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        scaler.backward(loss_of(model))
        scaler.step(optimizer)
        optimizer.zero_grad()
        each(step)


def row_of(watched: Watch, name: str, kind: str, step: int = 0) -> WatchRow:
    (found,) = [row for row in watched.rows() if (row.step, row.name, row.kind) == (step, name, kind)]
    return found


def test_there_are_no_hooks_on_the_model_between_samples() -> None:
    model = model_of()
    scaler = LossScaler(model)
    watched = watch(model, scaler, every=3)
    assert hooks_on(model) > 0
    found: list[int] = []
    train(model, scaler, 7, lambda _: found.append(hooks_on(model)))
    # After a step, hooks are there only if the next one is sampled: steps 3 and 6.
    assert [count > 0 for count in found] == [False, False, True, False, False, True, False]
    assert {row.step for row in watched.rows()} == {0, 3, 6}


def test_only_steps_in_the_given_ranges_are_sampled() -> None:
    model = model_of()
    scaler = LossScaler(model)
    watched = watch(model, scaler, every=2, steps=[(1, 4), (6, 9)])
    assert hooks_on(model) == 0
    train(model, scaler, 10)
    assert sorted({row.step for row in watched.rows()}) == [2, 6, 8]


def test_every_tensor_of_a_module_is_recorded_forward_and_backward() -> None:
    model = model_of()
    scaler = LossScaler(model)
    watched = watch(model, scaler)
    train(model, scaler, 1)
    assert {(row.name, row.kind) for row in watched.rows()} == {
        *((name, kind) for name in ("(model)", "0", "1", "2") for kind in ("input", "output", "output_grad")),
        *((name, kind) for name, _ in model.named_parameters() for kind in ("weight", "weight_grad")),
    }


@pytest.mark.parametrize("scale", [1.0, 2.0**12, 1000.0])
def test_recorded_gradients_are_unscaled_and_the_row_has_their_scale(scale: float) -> None:
    model = model_of()
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
    scaler = LossScaler(model, Static(scale))
    watched = watch(model, scaler)
    train(model, scaler, 1)
    row = row_of(watched, "0.weight", "weight_grad")
    assert row.amax == pytest.approx(float(grads[0].abs().max()), rel=1e-6)
    assert row.scale == scale
    assert row.formats["FP16"] == losses(exponent_histogram(grads[0].cpu().numpy()), FP16, scale)
    assert row_of(watched, "0", "input").scale == 1.0


def test_micro_batches_are_counted_together_and_their_gradient_once() -> None:
    model = model_of()
    scaler = LossScaler(model)
    watched = watch(model, scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.backward(loss_of(model))
    summed = next(model.parameters()).grad.abs().max() / scaler.loss_scale  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert row_of(watched, "2", "output").elements == 3 * 5 * 2
    assert row_of(watched, "0.weight", "weight_grad").elements == 4 * 3
    assert row_of(watched, "0.weight", "weight_grad").amax == float(summed)


def test_a_backward_pass_that_is_run_again_at_a_lower_scale_is_counted_once() -> None:
    model = model_of()
    scaler = LossScaler(model, Dynamic(init_scale=2.0**126))
    watched = watch(model, scaler, every=1)
    scaler.backward(1e3 * loss_of(model), retries=16)
    assert scaler.step(torch.optim.SGD(model.parameters(), lr=0.1)).retries > 1
    row = row_of(watched, "2", "output_grad")
    assert (row.elements, row.infs, row.nans) == (10, 0, 0)
    assert row.scale < 2.0**126


def test_a_forward_pass_without_gradients_is_not_recorded() -> None:
    model = model_of()
    watched = watch(model)
    with torch.no_grad():
        model(batch() * 1000)
    loss_of(model).backward()
    watched.step()
    assert row_of(watched, "0", "input").amax == float(batch().abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_module_is_counted_once(reentrant: bool) -> None:
    model = model_of()
    scaler = LossScaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, scaler, every=1)
    x = batch().requires_grad_()
    for _ in range(2):
        loss = model(x) if watched.step_index == 0 else checkpoint(model, x, use_reentrant=reentrant)
        scaler.backward(loss.square().mean())  # type: ignore[union-attr]
        scaler.step(optimizer)
        optimizer.zero_grad()
    elements = [{(row.name, row.kind): row.elements for row in watched.rows() if row.step == step} for step in (0, 1)]
    assert elements[0] == elements[1]


def test_an_output_that_a_later_layer_changes_in_place_is_recorded_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    watched = watch(model)
    model(batch()).sum().backward()
    watched.step()
    assert row_of(watched, "0", "output").zeros == 0
    assert row_of(watched, "1", "output").zeros > 0


def test_a_skipped_step_is_recorded_with_its_infs() -> None:
    model = model_of()
    scaler = LossScaler(model, Static(2.0**10))
    watched = watch(model, scaler)
    handle = model[2].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * torch.inf,))
    train(model, scaler, 1)
    handle.remove()
    row = row_of(watched, "0.weight", "weight_grad")
    assert row.infs + row.nans > 0
    assert watched.step_index == 1


@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler])
def test_a_grad_scaler_gives_the_scale_and_the_loop_counts_the_steps(make: Callable[..., Any]) -> None:
    model = model_of()
    scaler = make("cpu", init_scale=2.0**7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, scaler, every=2)
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        watched.step()
    assert {(row.step, row.scale) for row in watched.rows() if row.kind == "weight_grad"} == {(0, 128.0), (2, 128.0)}


def test_a_step_that_the_loss_scaler_counts_is_not_counted_by_hand() -> None:
    model = model_of()
    watched = watch(model, LossScaler(model))
    with pytest.raises(RuntimeError, match=r"counts the steps\. Leave out `watched\.step\(\)`"):
        watched.step()


def test_layers_chooses_modules_by_their_names() -> None:
    model = model_of()
    with watch(model, layers=r"^2$") as watched:
        loss_of(model).backward()
        watched.step()
    assert {row.name for row in watched.rows()} == {"2", "2.weight", "2.bias"}


def test_closing_removes_every_hook_and_the_link_to_the_scaler() -> None:
    model = model_of()
    scaler = LossScaler(model)
    with watch(model, scaler):
        pass
    assert hooks_on(model) == 0
    train(model, scaler, 1)
    assert scaler._memory.after_step == []


def test_rows_become_flat_dicts_and_a_table() -> None:
    model = model_of()
    with watch(model, formats=["fp16", "e4m3"]) as watched:
        loss_of(model).backward()
        watched.step()
    first = watched.to_dicts()[0]
    assert {"step", "name", "kind", "scale", "fp16_flushed", "fp8_e4m3_snr_db"} <= first.keys()
    assert "formats" not in first
    table = watched.table("e4m3")
    assert "FP8_E4M3" in " ".join(table.split())
    assert "weight_grad" in table
    assert max(map(len, table.splitlines())) <= 120
    with pytest.raises(ValueError, match=r"must be one that is watched: FP16, FP8_E4M3\. Received: BF16"):
        watched.table("bf16")
    watched.clear()
    assert watched.rows() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when its compiler is imported
def test_a_compiled_model_is_refused() -> None:
    model = model_of()
    model[2].compile()
    with pytest.raises(ValueError, match=r"A compiled model runs no hooks.*in which 2 is compiled"):
        watch(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "`every` must be a positive number of steps. Received: every=0"),
        ({"steps": [(5, 5)]}, r"`steps` must be pairs .* Received: \(5, 5\)"),
        ({"steps": (0, 100)}, r"`steps` must be pairs .* Received: 0\. The first hundred are steps=\[\(0, 100\)\]"),
        ({"steps": 100}, r"`steps` must be pairs .* Received: 100"),
        ({"layers": "encoder"}, "`layers` must be found in the name of a module"),
    ],
)
def test_settings_that_would_record_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        watch(model_of(), **settings)


def test_a_scaler_without_a_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="`scaler` must be a `LossScaler`, a `GradScaler` or None"):
        watch(model_of(), scaler=3)


def test_copies_of_the_model_and_the_scaler_are_not_watched() -> None:
    model = model_of()
    scaler = LossScaler(model)
    watched = watch(model, scaler)
    other_model, other = copy.deepcopy((model, scaler))
    train(other_model, other, 2)
    assert watched.step_index == 0
    pickle.loads(pickle.dumps(model))(batch())
    assert watched._recorder is not None
    assert watched._recorder.detach() == {}
