"""The probe names the first operation that is not finite, and leaves everything as it was."""

import copy
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import autocast
from tests.torch.probing.models import Attention, Block, Stack, fp16_step, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale import Dynamic, Headroom, Static
from gradscale.engine.probe_report import ProbeReport
from gradscale.torch import LossScaler, Verdict, probe


def line_of(part: type, text: str) -> int:
    """Returns the number of the line of a class that holds `text`."""
    lines, first = inspect.getsourcelines(part)
    return first + next(index for index, line in enumerate(lines) if text in line)


def zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


def overflowing_add() -> tuple[Stack, ProbeReport]:
    model = Stack(Block(), Block())
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.bias.fill_(40000.0)
        model.parts[0].fc2.bias.fill_(40000.0)  # type: ignore[union-attr, operator]
    return model, LossScaler(model).probe(fp16_step(model))


def test_an_add_between_modules_that_overflows_is_named() -> None:
    _, report = overflowing_add()
    operation = report.operation
    assert operation is not None
    assert report.verdict is Verdict.FORWARD_OVERFLOW
    assert (operation.name, operation.phase, operation.module, operation.module_type) == (
        "add",
        "forward",
        "parts.0",
        "Block",
    )
    assert operation.inputs_finite
    assert not operation.finite


def test_the_line_of_the_operation_is_the_users() -> None:
    _, report = overflowing_add()
    source = report.operation and report.operation.source
    assert source
    assert source.file.endswith("models.py")
    assert (source.line, source.text) == (line_of(Block, "the residual add"), "return x + h  # the residual add")


def test_module_hooks_would_not_have_seen_the_add() -> None:
    """The modules on both sides of it return finite numbers."""
    model, _ = overflowing_add()
    finite: dict[str, bool] = {}
    for name, part in model.named_modules():
        part.register_forward_hook(lambda *args, name=name: finite.update({name: bool(args[2].isfinite().all())}))
    fp16_step(model)()
    assert finite["embed"]
    assert finite["parts.0.fc2"]
    assert not finite["parts.0"]


def test_an_operation_of_the_backward_pass_has_module_and_line_of_its_forward_pass() -> None:
    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0**-8 * 2.0**14  # steep

    model = Stack(Block(), Steep())

    def step() -> Tensor:
        with autocast():
            return model(rows()).float().mean()

    report = LossScaler(model, Static(2.0**8)).probe(step)
    operation = report.operation
    assert operation is not None
    assert report.verdict is Verdict.SCALE_TOO_HIGH
    assert (operation.phase, operation.module) == ("backward", "parts.1")
    assert operation.source is not None
    assert operation.source.line == line_of(Steep, "# steep")


def test_a_scale_that_is_too_high_is_found_with_the_one_that_fits() -> None:
    model = Stack(Block(), Block())
    scaler = LossScaler(model, Static(2.0**30))
    report = scaler.probe(fp16_step(model))
    assert report.verdict is Verdict.SCALE_TOO_HIGH
    assert report.halvings is not None
    fits = 2.0**30 / 2**report.halvings
    assert report.fitting_scale == fits
    assert scaler.probe(fp16_step(model), scale=fits).verdict is Verdict.FINITE
    assert scaler.probe(fp16_step(model), scale=2 * fits).verdict is Verdict.SCALE_TOO_HIGH


def test_a_fitting_scale_below_one_is_advised_with_a_policy_that_reaches_it() -> None:
    model = Stack(Block(), Block())
    report = LossScaler(model, Static(1.0)).probe(fp16_step(model, weight=2.0**20))
    assert report.verdict is Verdict.SCALE_TOO_HIGH
    assert report.fitting_scale is not None
    assert report.fitting_scale < 1
    assert "Headroom" in report.advice


def test_a_mask_of_minus_infinity_is_not_a_fault() -> None:
    model = Stack(Attention(mask=True), Attention(mask=True))
    assert LossScaler(model, Headroom(init_scale=1024.0)).probe(fp16_step(model)).verdict is Verdict.FINITE


def test_behind_a_mask_the_operation_that_overflows_is_named() -> None:
    model = Stack(Attention(mask=True), Attention(gain=1e4, mask=True))
    operation = LossScaler(model).probe(fp16_step(model)).operation
    assert operation is not None
    assert (operation.name, operation.module) == ("mm", "parts.1")


def test_a_row_that_is_masked_as_a_whole_is_named_at_its_softmax() -> None:
    model = nn.Linear(4, 4)

    def step() -> Tensor:
        scores = model(rows()).masked_fill(torch.ones(8, 4, dtype=torch.bool), -math.inf)
        return torch.softmax(scores, -1).sum()

    report = LossScaler(model).probe(step)
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.UNDEFINED, "_softmax")


def test_an_input_mask_that_hides_a_whole_row_is_named_at_the_softmax() -> None:
    model = nn.Linear(4, 4)
    mask = torch.zeros(8, 4)
    mask[0] = -math.inf
    report = LossScaler(model).probe(lambda: torch.softmax(model(rows()) + mask, -1).sum())
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.UNDEFINED, "_softmax")


def test_a_mask_multiplied_by_minus_infinity_is_named_at_the_product() -> None:
    model, mask = nn.Linear(4, 4), torch.zeros(8, 4)
    report = LossScaler(model).probe(lambda: torch.softmax(model(rows()) + mask * -math.inf, -1).sum())
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.UNDEFINED, "mul")


def test_infinities_that_do_not_reach_the_loss_are_not_named() -> None:
    model = nn.Linear(4, 1)

    def step() -> Tensor:
        x = rows()
        safe = torch.where(x > 0, x.clamp(min=0).log(), 0.0)
        return model(safe).square().mean()

    assert LossScaler(model, Static(1.0)).probe(step).verdict is Verdict.FINITE


@pytest.mark.parametrize("write", [Tensor.zero_, Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_])
def test_memory_that_is_overwritten_is_not_an_input_before_the_first(write: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(4, 4).half()

    def step() -> Tensor:
        noise = write(torch.full((8, 4), math.nan, dtype=torch.float16))  # what dropout in FP16 finds in fresh memory
        return ((model(rows().half()) + noise) * 60000 * 60000).float().square().mean()

    report = LossScaler(model).probe(step)
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.FORWARD_OVERFLOW, "mul")
    assert [each for each in report.frames[1:-1] if not (each.finite and each.inputs_finite)] == []


def test_a_tensor_that_is_written_in_parts_has_the_origin_of_the_part_that_is_not_finite() -> None:
    model = nn.Linear(4, 2)

    def step() -> Tensor:
        y, both = model(rows()), torch.zeros(2, 8, 2)
        both[0] = y / torch.zeros(2)
        both[1] = y
        return both.sum()

    report = LossScaler(model).probe(step)
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.UNDEFINED, "div")


def test_a_square_root_at_zero_is_undefined_at_any_scale() -> None:
    model = nn.Linear(4, 2)
    zero(model)
    report = LossScaler(model, Dynamic()).probe(lambda: model(rows()).abs().sqrt().sum())
    assert report.operation is not None
    assert (report.verdict, report.operation.phase, report.halvings) == (Verdict.UNDEFINED, "backward", None)
    assert report.operation.source is not None
    assert "sqrt" in report.operation.source.text


def test_a_batch_that_is_bad_is_told_from_a_bad_model() -> None:
    model = Stack(Block(), Block())
    scaler = LossScaler(model, Headroom(init_scale=1024.0))
    bad, good = fp16_step(model, rows() * 1e6), fp16_step(model)
    assert scaler.probe(bad, other=good).verdict is Verdict.BAD_BATCH
    assert scaler.probe(bad, other=bad).verdict is Verdict.FORWARD_OVERFLOW


def test_after_a_skipped_step_its_scale_is_probed() -> None:
    model = Stack(Block(), Block())
    scaler = LossScaler(model, Dynamic(init_scale=2.0**40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.backward(fp16_step(model)())
    assert scaler.step(optimizer).skipped()
    optimizer.zero_grad()
    assert scaler.probe(fp16_step(model)).scale == 2.0**40
    assert scaler.probe(fp16_step(model), scale=8.0).scale == 8.0


class Stateful(nn.Module):
    """Has buffers that the forward pass writes to, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("scale", [1024.0, 2.0**40], ids=["finite", "too high"])
def test_everything_is_as_before_afterwards(scale: float) -> None:
    model = Stateful()
    scaler = LossScaler(model, Static(scale))
    scaler.protect_buffers()
    fired: list[Tensor] = []
    weight: nn.Parameter = model.body[0].weight  # type: ignore[assignment]
    weight.register_post_accumulate_grad_hook(fired.append)
    weight.grad = torch.ones(4, 4)
    x = rows().requires_grad_()
    state, saved, numbers = copy.deepcopy(model.state_dict()), scaler.state_dict(), torch.get_rng_state()
    scaler.probe(fp16_step(model, x))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert scaler.state_dict() == saved
    assert torch.equal(weight.grad, torch.ones(4, 4))
    assert [parameter.grad is None for parameter in model.parameters()] == [False, *[True] * 5]
    assert x.grad is None
    assert fired == []
    assert scaler.last is None
    assert not any(part._forward_hooks for part in model.modules())


def test_a_buffer_that_the_step_replaces_is_put_back() -> None:
    class Averaged(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.average = self.average * 0.9 + y.detach().mean(0)
            return y

    model = Averaged()
    held = model.average
    probe(lambda: model(rows()).sum(), model)
    assert model.average is held
    assert torch.equal(held, torch.zeros(2))


def test_a_buffer_that_is_expanded_is_left_alone() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
    assert probe(lambda: model(rows()).sum(), model).verdict is Verdict.FINITE
    assert torch.equal(model.get_buffer("mask"), torch.ones(3, 2))


def test_everything_is_as_before_if_the_step_raises() -> None:
    model = Stateful()
    state = copy.deepcopy(model.state_dict())

    def step() -> Tensor:
        raise_after = model(rows())
        raise KeyError(raise_after.shape)

    with pytest.raises(KeyError):
        LossScaler(model).probe(step)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks for part in model.modules())


def test_training_goes_on_after_a_probe_in_the_middle_of_an_accumulation() -> None:
    def trained(probes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stateful()
        scaler, optimizer = LossScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            scaler.backward(fp16_step(model)())
            if probes:
                scaler.probe(fp16_step(model))
            scaler.backward(fp16_step(model)())
            scaler.step(optimizer)
            optimizer.zero_grad()
        return list(model.state_dict().values())

    assert all(map(torch.equal, trained(probes=True), trained(probes=False)))


def test_recomputed_operations_have_the_line_that_recomputes_them() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

        def body(self, x: Tensor) -> Tensor:
            return self.inner(x).abs().sqrt()  # recomputed

    model = Checkpointed()
    zero(model.inner)
    report = LossScaler(model).probe(lambda: model(rows()).sum())
    assert report.operation is not None
    assert report.operation.source is not None
    assert report.operation.source.line == line_of(Checkpointed, "# recomputed")


def test_a_compiled_model_is_probed_uncompiled() -> None:
    model = Stack(Block(), Block())
    with torch.no_grad():
        model.parts[1].fc1.weight[0, 0] = math.nan  # type: ignore[index]
    compiled: Any = torch.compile(model, backend="eager")
    report = LossScaler(compiled).probe(fp16_step(compiled))
    assert report.tensor == "parts.1.fc1.weight"


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of the compiler itself
def test_a_scripted_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 2)))
    with torch.no_grad():
        model[1].bias[0] = math.nan  # type: ignore[index]
    report = LossScaler(model).probe(lambda: model(rows()).sum())
    assert report.operation is not None
    assert (report.tensor, report.operation.module) == ("1.bias", "1")


def test_the_module_of_an_operation_is_the_one_whose_method_runs() -> None:
    class Doubled(nn.Linear):
        def doubled(self, x: Tensor) -> Tensor:
            return self.forward(x) / 0.0

    model = nn.Sequential(Doubled(4, 4))
    operation = LossScaler(model).probe(lambda: model[0].doubled(rows()).sum()).operation  # type: ignore[operator]
    assert operation is not None
    assert (operation.name, operation.module, operation.module_type) == ("div", "0", "Doubled")


def test_several_models_have_their_index_before_the_path() -> None:
    models = nn.Linear(4, 4), nn.Linear(4, 2)
    with torch.no_grad():
        models[1].bias[0] = math.inf
    report = LossScaler(models).probe(lambda: models[1](models[0](rows())).sum())
    assert report.operation is not None
    assert (report.tensor, report.operation.module) == ("1.bias", "1")


def test_the_last_operations_are_kept() -> None:
    _, report = overflowing_add()
    assert report.frames[-1] is report.operation
    assert all(each.finite for each in report.frames[:-1])
    assert len(report.frames) > 8
    model = Stack(Block(), Block())
    assert len(LossScaler(model).probe(fp16_step(model), frames=3).frames) == 3


def test_the_text_names_operation_module_line_and_numbers() -> None:
    text = str(overflowing_add()[1])
    assert text.startswith("forward_overflow: the forward pass overflows float16 in `add` in parts.0 (Block)")
    assert "given float16[8, 4] amax 4e+04, float16[8, 4] amax 4e+04" in text
    assert "returned float16[8, 4] amax inf" in text
    assert "return x + h" in text


def test_without_a_model_it_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="needs the model"):
        LossScaler().probe(lambda: torch.ones((), requires_grad=True))


def test_a_step_that_returns_no_loss_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"must return the loss.*shape \[8, 2\]"):
        probe(lambda: model(rows()), model)


def test_a_step_that_returns_a_plain_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must return the loss.*Received: float\."):
        probe(lambda: 1.0, nn.Linear(4, 2))  # type: ignore[arg-type,return-value]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes modules after the step\. Received: NoneType"):
        probe(lambda: torch.ones((), requires_grad=True), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_multiplies_no_loss_is_refused(scale: float) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="`scale` must be positive and finite"):
        probe(lambda: model(rows()).sum(), model, scale=scale)


def test_a_number_that_needs_a_gradient_may_overflow() -> None:
    model = nn.Linear(4, 2)
    gain = nn.Parameter(torch.tensor(1e30))
    report = probe(lambda: (model(rows()).abs().sum() + 1) * gain * gain, model)
    assert report.operation is not None
    assert report.operation.name == "mul"


def test_a_complex_number_may_overflow() -> None:
    model = nn.Linear(4, 2)
    large = torch.tensor(1e30 + 1e30j)
    report = probe(lambda: (model(rows()).sum() * large * large).abs(), model)
    assert report.operation is not None
    assert report.operation.name == "mul"


def test_importing_the_adapter_does_not_load_the_compiler() -> None:
    code = "import gradscale.torch, sys; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_same_step_in_float32_is_finite() -> None:
    model, report = overflowing_add()
    assert report.verdict is Verdict.FORWARD_OVERFLOW

    def wide() -> Tensor:
        with autocast(enabled=False):
            return model(rows()).square().mean()

    assert LossScaler(model, Static(1.0)).probe(wide).verdict is Verdict.FINITE
