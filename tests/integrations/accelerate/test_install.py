"""What `install` takes and refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import GradScalerKwargs
from torch import nn

from gradscale import Dynamic, Headroom, NoScaling
from gradscale.integrations.accelerate import install
from gradscale.torch import GradScaler, ShardedGradScaler


def fp16(*handlers: Any) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=list(handlers))


def rule_of(scaler: GradScaler) -> tuple[float, float, float, int]:
    return (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


def test_scaler_is_returned_and_is_the_accelerators() -> None:
    accelerator = fp16()
    scaler = install(accelerator, on_stuck="raise", max_consecutive_skips=7)
    assert accelerator.scaler is scaler
    assert type(scaler) is GradScaler
    assert accelerator.native_amp
    assert isinstance(accelerator, Accelerator)
    assert type(accelerator).__name__ == "Accelerator"


def test_policy_is_auto_unless_another_is_given() -> None:
    assert repr(install(fp16())).startswith("GradScaler(Headroom()")


def test_numbers_of_grad_scaler_kwargs_are_the_rule() -> None:
    scaler = install(fp16(GradScalerKwargs(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)))
    assert rule_of(scaler) == (64.0, 4.0, 0.25, 7)


def test_grad_scaler_kwargs_without_numbers_are_torchs_rule() -> None:
    assert rule_of(install(fp16(GradScalerKwargs()))) == (65536.0, 2.0, 0.5, 2000)


def test_disabled_by_grad_scaler_kwargs_is_disabled() -> None:
    assert not install(fp16(GradScalerKwargs(enabled=False))).is_enabled()
    assert not install(fp16(GradScalerKwargs(enabled=False)), NoScaling()).is_enabled()


def test_policy_that_says_the_same_as_grad_scaler_kwargs_may_say_more() -> None:
    policy = Dynamic(init_scale=64.0, max_scale=128.0)
    assert rule_of(install(fp16(GradScalerKwargs(init_scale=64.0)), policy)) == (64.0, 2.0, 0.5, 2000)


def test_torchs_rule_by_name_agrees_with_grad_scaler_kwargs_of_the_same_numbers() -> None:
    scaler = install(fp16(GradScalerKwargs(init_scale=64.0)), "torch:init_scale=64.0")
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        (Headroom(), GradScalerKwargs()),
        ("auto", GradScalerKwargs(init_scale=64.0)),
        ("torch", GradScalerKwargs(init_scale=64.0)),
        (Dynamic(init_scale=32.0), GradScalerKwargs(init_scale=64.0)),
        (Dynamic(), GradScalerKwargs(enabled=False)),
    ],
)
def test_policy_that_contradicts_grad_scaler_kwargs_is_refused(policy: Any, given: GradScalerKwargs) -> None:
    accelerator = fp16(given)
    with pytest.raises(ValueError, match=re.escape(f"and {given!r}. Give one of them.")):
        install(accelerator, policy)
    assert accelerator.scaler is None
    assert not accelerator.native_amp


def test_second_install_is_refused() -> None:
    accelerator = fp16()
    install(accelerator)
    with pytest.raises(RuntimeError, match="was called on this accelerator before"):
        install(accelerator)


def test_install_after_prepare_is_refused() -> None:
    accelerator = fp16()
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=r"must come before `accelerator.prepare`.*Prepared already: SGD\."):
        install(accelerator)


def test_model_that_was_prepared_before_runs_in_fp16_too() -> None:
    accelerator = fp16()
    frozen: Any = accelerator.prepare_model(nn.Sequential(nn.Linear(2, 2)), evaluation_mode=True)
    types = []
    frozen[0].register_forward_hook(lambda module, args, out: types.append(out.dtype))
    frozen(torch.ones(1, 2))
    install(accelerator)
    frozen(torch.ones(1, 2))
    assert types == [torch.float32, torch.float16]
    assert accelerator._models == [frozen]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerator_of_another_precision_is_refused(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    for policy in (None, "auto", "none"):
        with pytest.raises(ValueError, match=f"Received: mixed_precision='{precision}', which needs no loss scaling"):
            install(accelerator, policy)


def test_library_with_a_scaler_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = fp16()
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="an accelerator of DeepSpeed, which has a scaler of its own"):
        install(accelerator)


def test_shards_of_fsdp1_get_their_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = fp16()
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", False, raising=False)  # Accelerate 1.0 has no FSDP2
    assert type(install(accelerator)) is ShardedGradScaler


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an `accelerate.Accelerator`. Received: Linear"):
        install(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_run_is_recorded(tmp_path: Path) -> None:
    scaler = install(fp16(), record=tmp_path / "run.jsonl")
    assert scaler._memory.recorder._paths == [str(tmp_path / "run.jsonl")]
