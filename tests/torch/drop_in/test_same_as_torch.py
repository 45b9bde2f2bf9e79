"""The drop-in next to torch's scaler in the same loops: weights, gradients, optimizer state and scales are the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import (
    OURS,
    TORCH,
    batches,
    everything,
    give,
    grad_of,
    linear_pair,
    parameter,
    ready,
    saved_by,
    train,
)
from tests.torch.helpers import OPTIMIZERS, autocast, poison
from torch import Tensor, nn

KINDS = (OURS, TORCH)


def both(run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns what `run` makes of our scaler and of torch's, from the same random numbers."""
    torch.manual_seed(0)
    ours = run(OURS)
    torch.manual_seed(0)
    return ours, run(TORCH)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_it_is_a_torch_grad_scaler() -> None:
    assert isinstance(OURS("cpu"), torch.amp.GradScaler)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad_step", [None, 0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_exact(name: str, bad_step: int | None, clip: bool) -> None:
    if name == "sgd fused" and bad_step == 0:
        pytest.skip("torch leaves its momentum uninitialized; see test_differences.py")

    def run(kind: Any) -> tuple[list[Tensor], list[float]]:
        scaler = kind("cpu", init_scale=128.0, growth_interval=2)
        model, optimizer, scales = train(scaler, OPTIMIZERS[name], bad_step=bad_step, clip=clip)
        return everything(model, optimizer), scales

    (ours, our_scales), (theirs, their_scales) = both(run)
    assert_same(ours, theirs)
    assert our_scales == their_scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_equals_unscaled_training(name: str, kind: Any) -> None:
    scaled, _, _ = train(kind("cpu", init_scale=128.0, growth_interval=1), OPTIMIZERS[name])
    plain, _, _ = train(kind("cpu", enabled=False), OPTIMIZERS[name])
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_to_fp16_trains_like_float32(kind: Any, fused: bool) -> None:
    def loss_after(scaler: Any) -> float:
        model = linear_pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
        loss = torch.zeros(())
        for x, y in batches(20):
            optimizer.zero_grad()
            with autocast(dtype=torch.float16, enabled=scaler.is_enabled()):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.item()

    assert loss_after(kind("cpu")) == pytest.approx(loss_after(kind("cpu", enabled=False)), rel=1e-2)


def test_accumulated_gradients_are_the_same() -> None:
    def run(kind: Any) -> list[Tensor]:
        scaler, model = kind("cpu", init_scale=128.0, growth_interval=1), linear_pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index, (x, y) in enumerate(batches(6)):
            scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
            if index % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [*everything(model, optimizer), torch.tensor(scaler.get_scale())]

    assert_same(*both(run))


def test_gradient_penalty_is_the_same() -> None:
    def run(kind: Any) -> list[Tensor]:
        scaler, model = kind("cpu", init_scale=128.0, growth_interval=1), linear_pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            true = [grad * (1.0 / scaler.get_scale()) for grad in scaled]
            penalty = torch.stack([grad.pow(2).sum() for grad in true]).sum().sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
        return everything(model, optimizer)

    assert_same(*both(run))


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_skip_each_for_itself_and_share_the_scale(fused: bool) -> None:
    def run(kind: Any) -> list[Tensor]:
        scaler = kind("cpu", init_scale=128.0, growth_interval=1)
        models = [linear_pair(0), linear_pair(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=fused) for model in models]
        for index, (x, y) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = (model(x) for model in models)
            scaler.scale(nn.functional.mse_loss(0.3 * first + 0.7 * second, y)).backward(retain_graph=True)
            scaler.scale(nn.functional.mse_loss(0.6 * first - 0.4 * second, y)).backward()
            if index == 2:
                poison(list(models[1].parameters())[2])
            scaler.unscale_(optimizers[0])
            scaler.step(optimizers[0])
            scaler.step(optimizers[1])
            scaler.update()
        assert scaler.get_scale() == 128.0 * 2**3 / 2
        return [*models[0].parameters(), *models[1].parameters()]

    assert_same(*both(run))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explicit", [False, True])
def test_grad_scale_set_by_the_user_is_multiplied_in(kind: Any, explicit: bool) -> None:
    owner = parameter()
    optimizer = torch.optim.Adam([owner], fused=True)
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, 16.0))
    if explicit:
        scaler.unscale_(optimizer)
        assert torch.equal(grad_of(owner), torch.full((3,), 2.0))
    optimizer.grad_scale = torch.tensor([10.0])  # type: ignore[attr-defined]
    scaler.step(optimizer)
    torch.testing.assert_close(owner.grad, torch.full((3,), 0.2))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_broken_after_unscale_reach_the_optimizer(kind: Any, fused: bool) -> None:
    """The check is `unscale_`'s: what is done to the gradients afterwards is the caller's."""
    owner = parameter()
    optimizer = torch.optim.Adam([owner], fused=fused)
    scaler = ready(kind("cpu", init_scale=128.0))
    give((owner, 1.0))
    scaler.unscale_(optimizer)
    grad_of(owner).fill_(torch.nan)
    scaler.step(optimizer)
    assert owner.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_nested_outputs_keep_their_shape_and_the_first_tensor_decides_the_device(kind: Any) -> None:
    scaler = kind("cpu", init_scale=2.0)
    four = torch.full((1,), 4.0)
    scaled = scaler.scale([four, (four, [four]), iter([four])])
    assert [scaled[0], scaled[1], list(scaled[2])] == [8.0, (8.0, [8.0]), [8.0]]
    assert (type(scaled), type(scaled[1]), type(scaled[1][1])) == (list, tuple, list)
    assert scaler._scale.device == four.device


@pytest.mark.parametrize("kind", KINDS)
def test_scale_comes_to_be_with_the_first_loss(kind: Any) -> None:
    scaler = kind("cpu", init_scale=3.0)
    assert (scaler._scale, scaler._growth_tracker) == (None, None)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (3.0, 0)
    scaler.scale(torch.ones(()))
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.shape) == (torch.int32, ())


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_scaler_does_nothing(kind: Any) -> None:
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.1)
    scaler = kind("cpu", enabled=False)
    loss = owner.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: torch.zeros(()))
    scaler.update()
    scaler.load_state_dict({"anything": 1})
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_scaler_without_cuda_warns_and_disables_itself(kind: Any) -> None:
    with pytest.warns(UserWarning, match=r"GradScaler is enabled, but CUDA is not available\.  Disabling\."):
        scaler = kind()
    assert not scaler.is_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_step_returns_what_the_optimizer_returns_and_passes_arguments_on(kind: Any) -> None:
    class Echo(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return args, kwargs

    for fused in (False, True):
        owner = parameter()
        scaler, optimizer = ready(kind("cpu")), Echo([owner], lr=0.1, fused=fused)
        give((owner, 1.0))
        assert scaler.step(optimizer, None, 5, extra=6) == ((None, 5), {"extra": 6})
        scaler.update()


MISUSES: dict[str, Callable[[Any, Any, nn.Parameter], Any]] = {
    "step before scale": lambda s, o, p: s.step(o),
    "unscale before scale": lambda s, o, p: s.unscale_(o),
    "update before scale": lambda s, o, p: s.update(),
    "unscale twice": lambda s, o, p: (ready(s), s.unscale_(o), s.unscale_(o)),
    "step twice": lambda s, o, p: (ready(s), s.step(o), s.step(o)),
    "unscale after step": lambda s, o, p: (ready(s), s.step(o), s.unscale_(o)),
    "update with no step": lambda s, o, p: (ready(s), s.update()),
    "closure by keyword": lambda s, o, p: (ready(s), s.step(o, closure=None)),
    "no gradients": lambda s, o, p: (setattr(p, "grad", None), ready(s), s.step(o)),
    "fp16 gradients": lambda s, o, p: (_halve(p), ready(s), s.step(o)),
    "scale of a number": lambda s, o, p: s.scale(3.0),
    "tensor of two": lambda s, o, p: (ready(s), s.update(torch.ones(2))),
    "tensor that needs a gradient": lambda s, o, p: (ready(s), s.update(torch.ones(1, requires_grad=True))),
    "empty state": lambda s, o, p: s.load_state_dict({}),
    "state without its tracker": lambda s, o, p: s.load_state_dict(
        {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
    ),
    "pickled within a step": lambda s, o, p: (ready(s), s.step(o), copy.deepcopy(s)),
    "initialized twice": lambda s, o, p: (ready(s), s._lazy_init_scale_growth_tracker(torch.device("cpu"))),
}


def _halve(owner: nn.Parameter) -> None:
    owner.grad = None
    owner.data = owner.data.half()
    owner.grad = torch.ones(3, dtype=torch.float16)


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse_raises_the_same_error_with_the_same_text(misuse: Callable[[Any, Any, Any], Any]) -> None:
    def error_of(kind: Any) -> tuple[type, str]:
        owner = parameter()
        give((owner, 1.0))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            misuse(kind("cpu", init_scale=8.0), torch.optim.SGD([owner], lr=0.1), owner)
        return caught.type, " ".join(str(caught.value).split())  # older versions indent a second line

    assert error_of(OURS) == error_of(TORCH)


@pytest.mark.parametrize("argument", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_constructor_refuses_factors_with_the_words_of_torch(argument: dict[str, float]) -> None:
    def error_of(kind: Any) -> str:
        with pytest.raises(AssertionError) as caught:
            kind("cpu", **argument)
        return str(caught.value)

    assert error_of(OURS) == error_of(TORCH)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_losses_scaled_before_two_rounds_with_a_shared_parameter_are_the_same(set_to_none: bool, fused: bool) -> None:
    def run(kind: Any) -> list[Tensor]:
        scaler, shared, own = kind("cpu", init_scale=128.0), parameter(), parameter()
        first = torch.optim.SGD([shared], lr=0.5, fused=fused)
        second = torch.optim.SGD([own, shared], lr=0.25, fused=fused)
        losses = [scaler.scale(shared.sum() * 2), scaler.scale(shared.sum() + own.sum())]
        for loss, optimizer in zip(losses, (first, second), strict=True):
            loss.backward()
            scaler.step(optimizer)
            first.zero_grad(set_to_none)
            second.zero_grad(set_to_none)
        scaler.update()
        return [shared, own]

    assert_same(*both(run))


def test_several_losses_are_differentiated_after_an_update_that_left_the_scale_as_it_was() -> None:
    def run(kind: Any) -> list[Tensor]:
        scaler, owner = kind("cpu", init_scale=128.0), parameter()
        optimizer = torch.optim.SGD([owner], lr=0.5)
        for loss in scaler.scale([owner.sum(), owner.sum() * 2]):
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [owner]

    assert_same(*both(run))


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_with_a_grad_scaler_argument_is_handed_the_scaler(kind: Any) -> None:
    class Takes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")
            grad_scaler.unscale_(self)
            return grad_scaler

    class TakesTensors(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> Any:
            return self.grad_scale, self.found_inf  # type: ignore[attr-defined]

    owner, other = parameter(), parameter()
    scaler = ready(kind("cpu", init_scale=8.0))
    give((owner, 8.0), (other, 8.0))
    # Both are kept: torch knows an optimizer by its `id`, which the next one may get once the first is freed.
    takes, takes_tensors = Takes([owner], lr=0.1), TakesTensors([other], lr=0.1)
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        assert scaler.step(takes) is scaler
    grad_scale, found_inf = scaler.step(takes_tensors)
    assert (grad_scale, found_inf) == (torch.tensor(8.0), torch.tensor(0.0))
    scaler.update()


def test_update_leaves_the_tracker_alone_when_it_sets_the_scale() -> None:
    def run(kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        owner = parameter()
        scaler = ready(kind(torch.get_default_device().type, init_scale=8.0))
        optimizer = torch.optim.SGD([owner], lr=0.1)
        give((owner, 1.0))
        scaler.step(optimizer)
        scaler.update()
        scaler.update(2.0)
        first = saved_by(scaler)
        scaler.update(torch.tensor(4.0))
        return first, saved_by(scaler)

    ours, theirs = both(run)
    assert ours == theirs
    assert (ours[0]["scale"], ours[1]["scale"], ours[1]["_growth_tracker"]) == (2.0, 4.0, 1)


@pytest.mark.not_simulated("kernels in Python, which the compiler traces")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by the compiler itself
@pytest.mark.parametrize("policy", [None, "auto"])
@pytest.mark.parametrize("fused", [False, True])
def test_whole_step_inside_a_compiled_function_is_that_outside(fused: bool, policy: str | None) -> None:
    def trained(compile: Callable[[Any], Any]) -> list[Tensor]:
        model, scaler = linear_pair(), OURS("cpu", policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.unscale_and_clip_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()

        run = compile(step)
        for index, (x, y) in enumerate(batches()):
            run(x * torch.inf if index == 1 else x, y)
        assert (scaler.metrics()["applied"], scaler.metrics()["skipped"]) == (3, 1)
        return [parameter.detach() for parameter in model.parameters()]

    found = trained(lambda function: torch.compile(function, backend="eager"))
    torch.testing.assert_close(found, trained(lambda function: function))
