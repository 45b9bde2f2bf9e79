"""`protect_buffers`: what a forward pass did to the buffers is undone when the step is skipped."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, all_finite, poison, same
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


def setup(fused: bool = True) -> tuple[Any, torch.optim.Optimizer, LossScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = LossScaler(model, Dynamic(init_scale=1024.0))
    scaler.protect_buffers()
    return model, optimizer, scaler


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, x: Tensor) -> bool:
    scaler.backward(model(x).square().mean())
    skipped = scaler.step(optimizer).skipped()
    optimizer.zero_grad()
    return skipped


def test_an_applied_step_keeps_what_the_forward_pass_did() -> None:
    model, optimizer, scaler = setup()
    before = buffers(model)
    assert not step(model, optimizer, scaler, torch.randn(8, 4))
    assert not same(buffers(model), before)
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_batch_norms_statistics_survive_a_batch_that_is_not_finite(fused: bool, bad: float) -> None:
    model, optimizer, scaler = setup(fused)
    for _ in range(3):
        step(model, optimizer, scaler, torch.randn(8, 4))
    before = buffers(model)
    assert step(model, optimizer, scaler, torch.full((8, 4), bad))
    assert same(buffers(model), before)
    assert model[1].num_batches_tracked.item() == 3
    assert not step(model, optimizer, scaler, torch.randn(8, 4))
    assert all_finite(model.buffers())
    assert model[1].num_batches_tracked.item() == 4


def test_statistics_are_poisoned_for_good_without_protection() -> None:
    model, optimizer, _ = setup()
    step(model, optimizer, LossScaler(model, Dynamic()), torch.full((8, 4), INF))
    assert not all_finite(model.buffers())


def test_every_micro_batch_of_a_skipped_step_is_undone() -> None:
    model, optimizer, scaler = setup()
    before = buffers(model)
    for _ in range(3):
        scaler.backward(model(torch.randn(8, 4)).mean())
    poison(model[0].weight)
    scaler.step(optimizer)
    assert same(buffers(model), before)


def test_loading_a_checkpoint_counts_as_a_new_beginning() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    checkpoint = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    model.load_state_dict(checkpoint)
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert all((buffer == 2).all() for buffer in model.buffers())


def test_loading_a_checkpoint_into_one_layer_counts_too() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    model[1].load_state_dict({name: torch.full_like(value, 2) for name, value in model[1].state_dict().items()})
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert all((buffer == 2).all() for buffer in model.buffers())


class Reassigned(nn.Module):
    """Replaces its buffer in every forward pass instead of writing to it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x)


def test_a_buffer_that_is_replaced_in_every_forward_pass_is_protected_too() -> None:
    model = Reassigned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic())
    scaler.protect_buffers()
    assert not step(model, optimizer, scaler, torch.ones(2, 4))
    before = model.mean.clone()
    assert step(model, optimizer, scaler, torch.full((2, 4), INF))
    assert torch.equal(model.mean, before)


def test_a_module_that_changed_its_type_keeps_its_protection() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    model.double()
    before = buffers(model)
    scaler.backward(model(torch.full((8, 4), INF, dtype=torch.float64)).mean())
    scaler.step(torch.optim.SGD(model.parameters()))
    assert same(buffers(model), before)


def test_buffers_that_are_new_or_have_a_new_shape_are_taken_as_they_are() -> None:
    model = Reassigned()
    scaler = LossScaler(model, Dynamic())
    scaler.protect_buffers()
    model.register_buffer("late", torch.ones(1))
    model.mean = torch.full((2, 2), 3.0)
    scaler.backward(model.linear(torch.ones(1, 4)).sum() * INF)
    assert scaler.step(torch.optim.SGD(model.parameters())).skipped()
    assert model.get_buffer("late").item() == 1.0
    assert (model.mean == 3.0).all()


@pytest.mark.not_simulated("sparse tensors")
def test_buffers_that_cannot_be_written_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    model.register_buffer("expanded", torch.ones(1).expand(5))
    model.register_buffer("missing", None)
    scaler = LossScaler(model, Dynamic())
    scaler.protect_buffers()
    scaler.backward(model(torch.ones(1, 2)).sum() * INF)
    assert scaler.step(torch.optim.SGD(model.parameters())).skipped()


def test_a_graph_made_before_the_step_can_still_be_differentiated_after_it() -> None:
    generator = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    discriminator = nn.Linear(4, 1)
    of_g, of_d = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator))
    scaler = LossScaler([generator, discriminator], Dynamic())
    scaler.protect_buffers()
    fake = generator(torch.randn(8, 4))
    scaler.backward(discriminator(fake.detach()).mean())
    scaler.step(of_d)
    of_d.zero_grad()
    scaler.backward(-discriminator(fake).mean())
    assert not scaler.step(of_g).skipped()


def test_a_protected_model_can_be_copied_and_pickled() -> None:
    model, optimizer, scaler = setup()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(model, optimizer, scaler, torch.randn(8, 4))
        before = buffers(twin)
        step(model, optimizer, scaler, torch.full((8, 4), INF))
        assert same(buffers(twin), before)
        twin.load_state_dict(model.state_dict())


def test_a_layer_of_a_protected_wrapper_can_be_copied_alone() -> None:
    """As for an average of the weights. A wrapper of the compiler cannot be copied from inside of what it wraps."""
    model, _, _ = setup()
    wrapper = torch.compile(model, backend="eager")
    LossScaler(wrapper).protect_buffers()  # type: ignore[arg-type]
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    assert same(average.module.buffers(), model.buffers())
    average.module(torch.ones(8, 4))
    average.module.load_state_dict(model.state_dict())


@pytest.mark.parametrize("scaler_first", [False, True])
def test_a_copy_of_model_and_scaler_protects_the_copied_model_alone(scaler_first: bool) -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    before = buffers(model)
    if scaler_first:
        its_scaler, twin, its_optimizer = copy.deepcopy((scaler, model, optimizer))
    else:
        twin, its_optimizer, its_scaler = copy.deepcopy((model, optimizer, scaler))
    assert not step(twin, its_optimizer, its_scaler, torch.randn(8, 4))
    reached = buffers(twin)
    assert step(twin, its_optimizer, its_scaler, torch.full((8, 4), INF))
    assert same(twin.buffers(), reached)
    assert not same(reached, before)
    assert same(model.buffers(), before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_made_after_a_forward_pass_goes_back_to_before_it(duplicate: Any) -> None:
    model, optimizer, scaler = setup()
    before = buffers(model)
    model(torch.randn(8, 4))
    model, optimizer, scaler = duplicate((model, optimizer, scaler))
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert same(model.buffers(), before)


def test_loading_into_a_shallow_copy_of_a_protected_module_is_left_alone() -> None:
    model, optimizer, scaler = setup()
    twin = copy.copy(model[1])
    twin.load_state_dict({name: value + 1 for name, value in twin.state_dict().items()})
    assert not step(model, optimizer, scaler, torch.randn(8, 4))


def test_what_is_no_module_cannot_be_protected() -> None:
    with pytest.raises(TypeError, match="must be a module"):
        LossScaler().protect_buffers(3)  # type: ignore[arg-type]


def test_modules_can_be_named_and_must_be_known() -> None:
    with pytest.raises(
        ValueError, match=r"`protect_buffers` needs modules\. Build the scaler as `LossScaler\(model\)`"
    ):
        LossScaler().protect_buffers()
    model, optimizer, _ = setup()
    scaler = LossScaler(policy=Dynamic())
    scaler.protect_buffers(model)
    before = buffers(model)
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert same(buffers(model), before)


def test_protection_without_scaling_restores_nothing_as_nothing_is_skipped() -> None:
    model, optimizer, _ = setup()
    scaler = LossScaler(model, NoScaling())
    scaler.protect_buffers()
    step(model, optimizer, scaler, torch.randn(8, 4))
    assert model[1].num_batches_tracked.item() == 1


class WithAverage(nn.Module):
    """Has a buffer that the forward pass writes to, and one that the loop writes to after a step."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("call", [lambda model, x: model(x), lambda model, x: model.linear(model.norm(x))])
def test_what_was_written_to_a_buffer_after_the_last_step_is_kept(call: Any) -> None:
    model = WithAverage()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic())
    scaler.protect_buffers()
    for bad in (1.0, INF, INF):
        model.average += 1.0
        before = buffers(model)
        scaler.backward(call(model, torch.randn(8, 4) * bad).sum())
        assert scaler.step(optimizer).skipped() is (bad == INF)
        assert same(buffers(model), before) is (bad == INF)
        optimizer.zero_grad()
    assert model.average.tolist() == [3.0] * 4


def test_statistics_measured_by_update_bn_are_kept() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    torch.optim.swa_utils.update_bn([torch.randn(8, 4) for _ in range(3)], model)
    before = buffers(model)
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert same(buffers(model), before)


def test_the_first_of_several_forward_passes_is_the_one_to_go_back_to() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    before = buffers(model)
    with torch.no_grad():
        model.eval()(torch.randn(8, 4))
    model.train()
    outputs = model(torch.full((8, 4), INF)), model(torch.randn(8, 4))
    for output in outputs:
        scaler.backward(output.sum())
    assert scaler.step(optimizer).skipped()
    assert same(buffers(model), before)


def test_a_forward_pass_that_calls_no_hooks_goes_back_to_the_last_step() -> None:
    model, optimizer, scaler = setup()
    step(model, optimizer, scaler, torch.randn(8, 4))
    before = buffers(model)
    x = torch.full((8, 4), INF)
    for layer in model:
        x = layer.forward(x)
    scaler.backward(x.sum())
    assert scaler.step(optimizer).skipped()
    assert same(buffers(model), before)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_layer_that_was_replaced_is_protected_too(steps_before: int) -> None:
    model, _, scaler = setup()
    model[1] = nn.BatchNorm1d(8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps_before):
        step(model, optimizer, scaler, torch.randn(8, 4))
    model[1] = nn.BatchNorm1d(8)
    before = buffers(model)
    assert step(model, optimizer, scaler, torch.full((8, 4), INF))
    assert same(buffers(model), before)


def test_a_layer_that_was_replaced_is_not_kept_alive() -> None:
    model, optimizer, scaler = setup()
    replaced = weakref.ref(model[1])
    model[1] = nn.BatchNorm1d(8)
    step(model, optimizer, scaler, torch.randn(8, 4))
    gc.collect()
    assert replaced() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of the compiler itself
def test_buffers_of_a_compiled_model_are_protected() -> None:
    torch._dynamo.reset()
    model, optimizer, scaler = setup()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for bad in (1.0, 1.0, INF, 1.0, INF):
        before = buffers(model)
        assert step(compiled, optimizer, scaler, torch.randn(8, 4) * bad) is (bad == INF)
        assert same(buffers(model), before) is (bad == INF)
        model[1].running_mean += 1.0


@pytest.mark.cpu_only("`torch.export` runs on tensors of the CPU here")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # of `torch.export` itself
def test_a_protected_model_can_be_exported() -> None:
    model, _, _ = setup()
    batch = torch.randn(8, 4)
    exported = torch.export.export(model.eval(), (batch,), strict=False).run_decompositions()
    assert "copy" not in exported.graph_module.code
    assert same([exported.module()(batch)], [model(batch)])
