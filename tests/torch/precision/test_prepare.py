"""`prepare`: what becomes of models, optimizers and scalers."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch.helpers import autocast, small_model, weights
from tests.torch.precision.models import HALF_MODULES, NORMS, Net, dtypes, images, loss_of, prepared, train
from torch import Tensor, nn

from gradscale import NoScaling, Static
from gradscale.policies.headroom import Headroom
from gradscale.torch import O0, O1, O2, O3, MasterWeights, Precision, prepare
from gradscale.torch.precision.casts import input_output_cast_of
from gradscale.torch.precision.levels import LEVELS

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_is_the_same_object_with_the_same_parameters_and_names(level: str) -> None:
    model = Net()
    parameters, names = list(model.parameters()), list(model.state_dict())
    made, _, _ = prepared(level, model)
    assert made is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("level", ["O0", "O1", "O1-bf16"])
def test_weights_stay_float32_without_half_weights(level: str) -> None:
    model, _, _ = prepared(level)
    assert set().union(*dtypes(model).values()) == {FLOAT}


@pytest.mark.parametrize("compute", [HALF, BF16])
def test_half_weights_are_half_and_norms_float32(compute: torch.dtype) -> None:
    model, _, _ = prepared(replace(O2, compute=compute))
    found = dtypes(model)
    assert {name: found[name] for name in NORMS} == {name: {FLOAT} for name in NORMS}
    assert {name: found[name] for name in HALF_MODULES} == {name: {compute} for name in HALF_MODULES}
    assert model.position.dtype is compute
    assert model.calls.dtype is torch.int64


def test_norms_are_half_too_where_they_are_not_kept() -> None:
    model, _, _ = prepared("O3")
    assert set().union(*dtypes(model).values()) == {HALF}


@pytest.mark.parametrize("level", LEVELS)
def test_what_comes_out_is_float32(level: str) -> None:
    model, _, _ = prepared(level)
    assert {value.dtype for value in model(images()[0]).values()} == {FLOAT}


@pytest.mark.parametrize("output", [HALF, BF16, torch.float64])
def test_what_comes_out_is_what_was_asked_for(output: torch.dtype) -> None:
    model, _, _ = prepared(replace(O1, output=output))
    assert model(images()[0])["logits"].dtype is output


@pytest.mark.parametrize(("level", "dtype"), [(O1, HALF), (O3, HALF), (O0, FLOAT)])
def test_what_comes_out_can_be_left_as_it_is(level: Precision, dtype: torch.dtype) -> None:
    model, _, _ = prepared(replace(level, output=None))
    assert model(images()[0])["logits"].dtype is dtype


def test_activations_are_half_between_modules_and_around_norms() -> None:
    model, _, _ = prepared(O2)
    given: dict[str, torch.dtype] = {}
    for name, part in model.named_modules():
        part.register_forward_pre_hook(lambda _, args, name=name: given.__setitem__(name, args[0].dtype))
    model(images()[0])
    assert given.pop("") is FLOAT
    assert set(given) == {*NORMS, *HALF_MODULES, "norms"}
    assert set(given.values()) == {HALF}


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8), lambda: nn.GroupNorm(2, 8)])
@pytest.mark.parametrize("level", [O1, O2])
def test_norms_that_are_kept_compute_in_float32_on_every_device(level: Precision, make: Any) -> None:
    x, norm = torch.randn(2, 8) * 1000, make()
    expected = norm(x.half().float())
    given: list[torch.dtype] = []
    norm.weight.register_hook(lambda grad: given.append(grad.dtype))
    model, _, _ = prepared(replace(level, output=None), nn.Sequential(nn.Identity(), norm))
    found = model(x.half())
    assert torch.equal(found, expected if level is O1 else expected.half())
    found.sum().backward()
    assert given == [FLOAT]


def test_the_statistics_of_batch_norm_stay_exact_in_float32() -> None:
    model, _, _ = prepared(O2, nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 2)))
    model(torch.tensor([[1.0, 3.0], [1.0009765625, 3.0]]))
    assert model[0].running_mean.tolist() == [1.00048828125, 3.0]  # between two FP16 numbers


def test_modules_are_kept_in_float32_by_pattern_and_by_type() -> None:
    for kept in (("body.?",), ("body",), ("bod*",), (nn.Linear, "body.*")):
        model, _, _ = prepared(replace(O2, keep_fp32=kept))
        found = dtypes(model)
        assert found["body.0"] == found["body.2"] == {FLOAT}
        assert found["conv"] == {HALF}
        assert found["head"] == ({FLOAT} if nn.Linear in kept else {HALF})
        loss_of(model).backward()


def test_a_kept_module_computes_in_float32_under_autocast() -> None:
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    exact = model[1](model[0](x))
    model, _, _ = prepared(replace(O1, keep_fp32=("?",)), model)
    assert torch.equal(model(x), exact)
    with autocast(dtype=HALF):
        assert torch.equal(model(x), exact)


def test_a_kept_module_gets_float32_and_gives_half_amid_half_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    given: list[torch.dtype] = []
    model[1].get_parameter("weight").register_hook(lambda grad: given.append(grad.dtype))
    model, _, _ = prepared(replace(O2, keep_fp32=("1",)), model)
    model(torch.randn(3, 4)).sum().backward()
    assert given == [FLOAT]
    assert dtypes(model) == {"0": {HALF}, "1": {FLOAT}, "2": {HALF}}


def test_nothing_is_rounded_inside_a_kept_module() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.randn(3, 4).half().float()
    exact = part(x)
    model, _, _ = prepared(replace(O2, keep_fp32=("0*",)), nn.Sequential(part, nn.Linear(4, 2)))
    assert torch.equal(model[0](x), exact.half())


def test_a_module_with_two_names_is_kept_by_either() -> None:
    shared = nn.Linear(4, 4)
    for name in ("first", "second"):
        model = nn.ModuleDict({"first": shared, "second": shared, "third": nn.Linear(4, 4)})
        model, _, _ = prepared(replace(O2, keep_fp32=(name,)), copy.deepcopy(model))
        assert dtypes(model) == {"first": {FLOAT}, "third": {HALF}}


def test_batch_norm_needs_no_cast_and_float32_models_none_at_all_inside() -> None:
    model, _, _ = prepared(O2)
    assert [input_output_cast_of(model.get_submodule(name)) is None for name in NORMS] == [
        True,
        True,
        False,
        False,
        False,
    ]
    model, _, _ = prepared(O0)
    assert [name for name, part in model.named_modules() if input_output_cast_of(part) is not None] == [""]


def test_only_float32_becomes_half() -> None:
    model = small_model()
    model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    model, _, _ = prepared(O2, model)
    assert model.table.dtype is torch.float64
    assert model[0].weight.dtype is HALF


def test_a_type_that_matches_nothing_is_no_mistake() -> None:
    prepared(replace(O2, keep_fp32=(nn.LSTM,)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens)))


@pytest.mark.filterwarnings("ignore:These parameters are FP16")
@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_stay_tied_and_learn(level: str) -> None:
    model, optimizer, scaler = prepared(level, Tied())
    assert model.head.weight is model.embed.weight
    before = model.head.weight.clone()
    for _ in range(5):
        scaler.backward(model(torch.arange(10)).square().mean())
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.head.weight, before)


def test_what_shares_a_weight_with_a_kept_module_is_kept_too() -> None:
    model, _, _ = prepared(replace(O2, keep_fp32=("head",)), Tied())
    assert dtypes(model) == {"embed": {FLOAT}, "middle": {HALF}, "head": {FLOAT}}
    assert model.head.weight is model.embed.weight
    assert model(torch.arange(10)).dtype is FLOAT


def test_weights_shared_by_two_models_stay_float32_in_both() -> None:
    one, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = one[0].weight
    optimizer = torch.optim.SGD([*one.parameters(), *other[0].parameters(), other[1].get_parameter("bias")])
    prepare([one, other], optimizer, replace(O2, keep_fp32=("1",)))
    assert dtypes(other) == {"0": {HALF}, "1": {FLOAT}}
    assert dtypes(one) == {"0": {FLOAT}}


def test_frozen_parameters_become_half_and_stay_frozen() -> None:
    model = Net()
    model.conv.requires_grad_(False)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model, optimizer, scaler = prepare(model, optimizer, "O2")
    before = model.conv.weight.clone()
    train(model, optimizer, scaler, 2)
    assert model.conv.weight.dtype is HALF
    assert not model.conv.weight.requires_grad
    assert torch.equal(model.conv.weight, before)


def test_frozen_parameters_may_be_half_already() -> None:
    model = Net()
    model.conv.requires_grad_(False).half()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model, optimizer, scaler = prepare(model, optimizer, "O1")
    assert model.conv.weight.dtype is HALF
    train(model, optimizer, scaler, 1)


@pytest.mark.parametrize(
    ("precision", "policy"),
    [
        ("O0", NoScaling()),
        ("O1", Headroom()),
        ("O2", Headroom()),
        ("O2-bf16", NoScaling()),
        (replace(O1, policy=Static(4.0)), Static(4.0)),
    ],
)
def test_the_scaler_has_the_policy_of_the_precision(precision: Any, policy: Any) -> None:
    assert prepared(precision)[2].policy == policy


def test_several_models_and_optimizers_come_back_as_lists() -> None:
    models = [small_model(0), small_model(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    made, wrapped, scaler = prepare(models, optimizers, "O2")
    assert isinstance(made, list)
    assert [one is other for one, other in zip(made, models, strict=True)] == [True, True]
    assert all(isinstance(optimizer, MasterWeights) for optimizer in wrapped)
    x = torch.randn(3, 4)
    before = weights(*made)
    scaler.backward(made[0](x).square().mean())
    scaler.backward(made[1](x).square().mean())
    assert not scaler.step(*wrapped).skipped()
    assert sum(not torch.equal(a, b) for a, b in zip(weights(*made), before, strict=True)) == 8


def test_one_optimizer_of_several_models_comes_back_as_one() -> None:
    models = (small_model(0), small_model(1))
    optimizer = torch.optim.SGD([value for model in models for value in model.parameters()])
    made, same, _ = prepare(models, optimizer, "O1")
    assert isinstance(made, list)
    assert same is optimizer


def test_several_optimizers_of_one_model_come_back_as_a_list() -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.conv.parameters()), torch.optim.Adam(model.head.parameters())]
    made, wrapped, _ = prepare(model, optimizers, "O2")
    assert made is model
    assert [type(optimizer) for optimizer in wrapped] == [MasterWeights, MasterWeights]


def test_a_model_without_an_optimizer_can_be_prepared_with_others() -> None:
    student, teacher = small_model(0), small_model(1)
    teacher.requires_grad_(False)
    (_, made), _, _ = prepare([student, teacher], torch.optim.SGD(student.parameters()), "O2")
    assert made(torch.randn(2, 4)).dtype is FLOAT
    assert made[0].weight.dtype is HALF


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles_compute_the_same(level: str, copied: Any) -> None:
    model, _, _ = prepared(replace(LEVELS[level], keep_fp32=("head",)))
    model.eval()
    made = copied(model)
    assert made is not model
    assert torch.equal(made(images()[0])["logits"], model(images()[0])["logits"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_prepared_model_compiles_to_one_graph(level: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model, _, _ = prepared(level, model)
    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


def test_resuming_from_a_checkpoint_is_bit_exact() -> None:
    def start() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = Net()
        return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O2")

    whole = start()
    train(*whole, 3)
    saved = copy.deepcopy([part.state_dict() for part in whole])
    resumed = start()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(*whole, 3)
    train(*resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole[0]), weights(resumed[0]), strict=True))


@pytest.mark.not_simulated("recurrent layers")
def test_recurrent_models_take_packed_sequences() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 8)

        def forward(self, packed: Any) -> Any:
            return self.lstm(packed)

    model, _, _ = prepared(replace(O2, master_weights=None), Reader())
    packed, (hidden, _) = model(nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]))
    assert packed.data.dtype is hidden.dtype is FLOAT
    assert model.lstm.weight_ih_l0.dtype is HALF
