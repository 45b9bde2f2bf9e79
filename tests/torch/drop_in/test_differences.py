"""What the drop-in does otherwise than torch, one test per row of the table in `docs/use/torch_drop_in.md`.

Each test runs on both scalers and must fail on torch's: the marks are strict, so a row goes when torch mends it.
"""

import warnings
from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import OURS, TORCH, give, nothing_uninitialised, parameter, ready
from tests.torch.helpers import Wrapper
from tests.torch.versions import needs_gated_adagrad
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

INF = torch.inf

FUSED = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}


@pytest.fixture(params=[pytest.param(OURS, id="ours"), pytest.param(TORCH, id="torch", marks=pytest.mark.xfail)])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.filterwarnings("ignore:.* steps in a row were skipped")
def test_scale_never_reaches_zero_and_weights_stay_finite(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(kind("cpu", init_scale=1.0))
    for _ in range(200):
        give((owner, INF))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-126
    give((owner, 1.0 * scaler.get_scale()))
    scaler.step(optimizer)
    torch.testing.assert_close(owner.detach(), torch.full((3,), 0.9))


def test_scale_stops_where_its_reciprocal_is_still_a_normal_number(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(kind("cpu", init_scale=2.0**125, growth_interval=1))
    for _ in range(3):
        give((owner, 0.0))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**126


def test_dead_run_is_reported(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(kind("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(120):
            give((owner, INF))
            scaler.step(optimizer)
            scaler.update()
    assert len(caught) == 1


GATED = [
    pytest.param(make, marks=needs_gated_adagrad if name == "adagrad" else (), id=name) for name, make in FUSED.items()
]


@pytest.mark.parametrize("optimizer_of", GATED)
def test_overflow_on_two_devices_skips_a_fused_step(kind: Any, optimizer_of: Any) -> None:
    owner = parameter()
    optimizer = optimizer_of([owner])
    scaler = ready(kind("cpu", init_scale=1.0))
    give((owner, INF))
    scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    flags[torch.device("cpu", 1)] = torch.ones(())
    scaler.step(optimizer)
    assert torch.equal(owner.detach(), torch.ones(3))


def test_one_of_several_losses_is_differentiated_at_the_scale_that_will_divide_it(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.5)
    scaler = kind("cpu", init_scale=8.0, growth_interval=1)
    for loss in scaler.scale([owner.sum(), owner.sum()]):
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert owner.tolist() == [0.0, 0.0, 0.0]


def test_fused_optimizer_unscaled_before_it_has_gradients_is_refused_by_the_error_of_others(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.Adam([owner], fused=True)
    scaler = ready(kind("cpu"))
    scaler.unscale_(optimizer)
    give((owner, 1.0))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_positional_closure_is_refused(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(kind("cpu", init_scale=1.0))
    give((owner, 1.0))
    with pytest.raises(RuntimeError, match=r"Closure use is not currently supported if GradScaler is enabled\."):
        scaler.step(optimizer, lambda: torch.zeros(()))


def test_fp16_losses_do_not_overflow_when_scaled(kind: Any) -> None:
    losses = torch.tensor([1.0, 2.0], dtype=torch.float16)
    assert kind("cpu").scale(losses).tolist() == [65536.0, 131072.0]


def test_growth_interval_lowered_below_the_tracker_still_grows(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = ready(kind("cpu", init_scale=8.0, growth_interval=100))
    for step in range(6):
        if step == 5:
            scaler.set_growth_interval(3)
        give((owner, 1.0))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_gradient_that_unscaling_makes_infinite_skips_the_step(kind: Any, fused: bool, explicit: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, fused=fused)
    scaler = ready(kind("cpu", init_scale=2.0**-20))
    give((owner, 1e35))
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(owner.detach(), torch.ones(3))
    assert scaler.get_scale() == 2.0**-21


def test_momentum_of_a_fused_sgd_survives_a_skipped_first_step(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, momentum=0.9, fused=True)
    scaler = ready(kind("cpu", init_scale=1.0))
    with nothing_uninitialised():
        for grad in (INF, 1.0, 1.0):
            give((owner, grad))
            scaler.step(optimizer)
            scaler.update(1.0)
    torch.testing.assert_close(owner.detach(), torch.full((3,), 1 - 0.1 - 0.19))


@pytest.mark.parametrize("fused", [False, True])
def test_parameter_of_two_optimizers_is_refused_by_name(kind: Any, fused: bool) -> None:
    shared, own = parameter(), parameter()
    first = torch.optim.SGD([("shared", shared)], lr=0.1, fused=fused)
    second = torch.optim.SGD([("own", own), ("shared", shared)], lr=0.1, fused=fused)
    scaler = ready(kind("cpu", init_scale=8.0))
    give((shared, 8.0), (own, 8.0))
    scaler.step(first)
    with pytest.raises(
        RuntimeError, match=r"each divides its gradient by the scale\. Shared with another SGD: shared\."
    ):
        scaler.step(second)
    assert torch.equal(own.detach(), torch.ones(3))


def test_complex_gradients_are_unscaled(kind: Any) -> None:
    owner = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = ready(kind("cpu", init_scale=4.0))
    give((owner, torch.full((3,), 4 + 8j, dtype=torch.complex64)))
    scaler.step(optimizer)
    assert torch.equal(owner.detach(), torch.full((3,), 0 - 2j, dtype=torch.complex64))


def test_overflow_in_one_part_of_a_complex_gradient_skips_the_step(kind: Any) -> None:
    owner = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = ready(kind("cpu", init_scale=4.0))
    give((owner, torch.tensor([1 + 1j, complex(1.0, INF), 1 + 1j], dtype=torch.complex64)))
    scaler.step(optimizer)
    assert torch.equal(owner.detach(), torch.ones(3, dtype=torch.complex64))


class WithoutFloat64(TorchDispatchMode):
    """A device that has no float64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype is torch.float64:
            raise TypeError("This device has no float64.")
        return made


def test_device_needs_no_float64(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = ready(kind("cpu", init_scale=3.0))
    give((owner, 3.0))
    with WithoutFloat64():
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(owner.detach(), torch.zeros(3))


def test_update_takes_an_integer(kind: Any) -> None:
    scaler = ready(kind("cpu"))
    scaler.update(1024)
    assert scaler.get_scale() == 1024.0


def test_update_takes_a_tensor_of_one_element(kind: Any) -> None:
    scaler = ready(kind(torch.get_default_device().type))
    scaler.update(torch.tensor([1024.0]))
    assert scaler.get_scale() == 1024.0


def test_update_takes_a_tensor_where_the_device_was_given_with_its_number(kind: Any) -> None:
    scaler = ready(kind(f"{torch.get_default_device().type}:0"))
    scaler.update(torch.tensor(1024.0))
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("bad", [0.0, -1.0, INF, torch.nan, torch.tensor(0.0), torch.tensor(torch.nan)])
def test_update_refuses_what_is_no_scale(kind: Any, bad: Any) -> None:
    scaler = ready(kind(torch.get_default_device().type, init_scale=8.0))
    with pytest.raises(ValueError, match=r"`new_scale` must be from 1\.17549e-38 to 8\.50706e\+37"):
        scaler.update(bad)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("setter", "bad", "error", "text"),
    [
        ("set_growth_factor", 1.0, AssertionError, r"The growth factor must be > 1\.0\."),
        ("set_growth_factor", INF, ValueError, r"`growth_factor` must be finite\. Received: growth_factor=inf\."),
        ("set_backoff_factor", 1.0, AssertionError, r"The backoff factor must be < 1\.0\."),
        ("set_backoff_factor", 0.0, ValueError, r"`backoff_factor` must be greater than 0"),
        ("set_backoff_factor", torch.nan, ValueError, r"`backoff_factor` must be greater than 0"),
        ("set_growth_interval", 0, ValueError, r"`growth_interval` must be at least 1\. Received: growth_interval=0\."),
        (
            "set_growth_interval",
            2.5,
            TypeError,
            r"`growth_interval` must be an integer\. Received: .*=2\.5 \(float\)\.",
        ),
        ("set_growth_interval", True, TypeError, r"`growth_interval` must be an integer"),
    ],
)
def test_setters_check_what_they_are_given(kind: Any, setter: str, bad: Any, error: Any, text: str) -> None:
    scaler = kind("cpu")
    before = scaler.state_dict()
    with pytest.raises(error, match=text):
        getattr(scaler, setter)(bad)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        ({"init_scale": 0.0}, ValueError, r"`init_scale` must be from 1\.17549e-38 .*Received: init_scale=0\.0\."),
        ({"init_scale": -2.0}, ValueError, "`init_scale` must be from"),
        ({"init_scale": INF}, ValueError, "`init_scale` must be from"),
        ({"init_scale": 1e38}, ValueError, r"`init_scale` must be from .* to 8\.50706e\+37"),
        ({"growth_factor": INF}, ValueError, "`growth_factor` must be finite"),
        ({"growth_factor": torch.nan}, ValueError, "`growth_factor` must be finite"),
        ({"backoff_factor": 0.0}, ValueError, "`backoff_factor` must be greater than 0"),
        ({"growth_interval": 0}, ValueError, "`growth_interval` must be at least 1"),
        ({"growth_interval": 1e3}, TypeError, "`growth_interval` must be an integer"),
    ],
)
def test_constructor_refuses_what_cannot_work(kind: Any, argument: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        kind("cpu", **argument)


@pytest.mark.parametrize("bad", [0.0, -1.0, INF, torch.nan, 2.0**-127, 2.0**127])
def test_saved_scale_that_was_lost_is_refused(kind: Any, bad: float) -> None:
    scaler = ready(kind("cpu", init_scale=8.0))
    saved = scaler.state_dict() | {"scale": bad, "growth_factor": 4.0}
    with pytest.raises(ValueError, match=r"A saved scale must lie between 2\*\*-126 and 2\*\*126, .* Received: scale="):
        scaler.load_state_dict(saved)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (8.0, 2.0)


def test_saved_state_without_an_entry_changes_nothing(kind: Any) -> None:
    scaler = ready(kind("cpu", init_scale=8.0))
    saved = scaler.state_dict() | {"scale": 4.0}
    del saved["_growth_tracker"]
    with pytest.raises(KeyError):
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0


def test_scheduler_does_not_warn_of_a_step_that_was_skipped(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = ready(kind("cpu"))
    give((owner, INF))
    scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_step_that_raises_leaves_no_divisor_behind(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1, fused=True)
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, 8.0))
    hook = optimizer.register_step_pre_hook(_out_of_memory)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    hook.remove()
    scaler.step(optimizer)
    torch.testing.assert_close(owner.detach(), torch.full((3,), 0.9))


def _out_of_memory(*_: Any) -> None:
    raise MemoryError


class TakesScaler(torch.optim.SGD):
    """An optimizer of the older contract, which is handed the scaler."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._step_supports_amp_scaling = True
        self.was_given: Any = None

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        self.was_given = grad_scaler


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_optimizer_that_takes_the_scaler_gets_it_through_a_wrapped_step(kind: Any) -> None:
    owner = parameter()
    optimizer = TakesScaler([owner])
    plain_step = optimizer.step
    optimizer.step = lambda *args, **kwargs: plain_step(*args, **kwargs)  # type: ignore[method-assign]
    scaler = ready(kind("cpu"))
    give((owner, 1.0))
    scaler.step(optimizer)
    assert optimizer.was_given is scaler


def test_string_among_the_outputs_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        kind("cpu").scale(["loss"])


def test_a_fused_optimizer_inside_a_wrapper_is_stepped_on_unscaled_gradients(kind: Any) -> None:
    owner = parameter()
    wrapper = Wrapper(torch.optim.SGD([owner], lr=1.0, fused=True))
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, 4.0))
    scaler.step(wrapper)
    assert owner.tolist() == [0.5, 0.5, 0.5]
