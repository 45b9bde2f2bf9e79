"""Systems, variants and keywords by name."""

import subprocess
import sys

import pytest

from gradscale.peers import PEERS, export_state, import_state, preset
from gradscale.policies.static import NoScaling


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("Torch", "torch"),
        (" pytorch ", "torch"),
        ("torch_xla", "torch"),
        ("Lightning", "torch"),
        ("Megatron_LM", "megatron"),
        ("TF_Keras", "tf-keras"),
        ("tf", "tf-keras"),
        ("tensorflow", "tf-keras"),
        ("RL", "verl"),
    ],
)
def test_systems_are_found_whatever_the_case_and_the_dash(alias: str, name: str) -> None:
    assert preset(alias) == preset(name)


def test_every_system_is_registered() -> None:
    assert list(PEERS) == [
        "torch",
        "apex",
        "deepspeed",
        "megatron",
        "fairseq",
        "keras",
        "tf-keras",
        "jmp",
        "flax",
        "mxnet",
        "paddle",
        "mindspore",
        "openseq2seq",
        "popart",
        "chainer",
        "verl",
    ]


def test_variants_are_found_by_their_last_word() -> None:
    assert preset("torch", "GradScaler") == preset("torch", "torch.cuda.amp.GradScaler") == preset("torch")
    assert preset("apex", "contrib FP16_Optimizer") == preset("apex", "contrib.optimizers.FP16_Optimizer")


@pytest.mark.parametrize(
    ("system", "path", "name"),
    [
        ("apex", "apex.amp.scaler.LossScaler", "amp.LossScaler"),
        ("deepspeed", "deepspeed.runtime.fp16.unfused_optimizer._update_scale", "FP16_UnfusedOptimizer"),
        ("torch", "torch.amp.grad_scaler.GradScaler", "GradScaler"),
        ("openseq2seq", "LogMax", "LogMaxScaler"),
        ("openseq2seq", "Backoff", "BackoffScaler"),
    ],
)
def test_variants_are_found_by_their_path_and_by_the_systems_own_word(system: str, path: str, name: str) -> None:
    assert preset(system, path) == preset(system, name)


def test_a_class_of_another_module_that_only_shares_the_last_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must name a rule of apex. Received: 'fp16_utils.FP16_Optimizer'"):
        preset("apex", "fp16_utils.FP16_Optimizer")


def test_a_variant_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must name a rule of torch. Received: '3'"):
        preset("torch", 3)  # pyright: ignore[reportArgumentType]


def test_a_last_word_that_two_rules_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must name a rule of apex. Received: 'LossScaler'. Known: amp.LossScaler,"):
        preset("apex", "LossScaler")


@pytest.mark.parametrize("function", [preset, lambda name: import_state(name, {})])
def test_an_unknown_system_is_named_with_those_that_are_known(function) -> None:
    with pytest.raises(ValueError, match=r"`system` must be one of torch, apex.*Received: 'pytorcj'"):
        function("pytorcj")


def test_an_unknown_variant_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"Received: 'Nope'. Known: DynamicGradScaler, ConstantGradScaler"):
        preset("megatron", "Nope")


def test_an_unknown_keyword_is_named_with_those_that_are_known() -> None:
    with pytest.raises(TypeError, match=r"takes that system's own keywords: device, init_scale.*Received: scale"):
        preset("torch", scale=2.0)


def test_a_missing_keyword_is_named() -> None:
    with pytest.raises(TypeError, match=r"Received: none \(missing a required argument: 'initial_scale'\)"):
        preset("megatron", "ConstantGradScaler")


def test_a_system_that_saves_nothing_says_so() -> None:
    with pytest.raises(ValueError, match=r"chainer saves no state of its scaler. To start from its rule use `preset"):
        import_state("chainer", {})
    with pytest.raises(ValueError, match="chainer loads no state"):
        export_state("chainer", NoScaling(), NoScaling().start())


def test_importing_the_peers_loads_no_framework() -> None:
    code = "import gradscale.peers, sys; assert not {'torch', 'jax', 'keras', 'tensorflow', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
