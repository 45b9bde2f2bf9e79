"""Loops as people write them, each trained until it has learnt: in FP16 autocast on the CPU where that matters."""

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.torch.helpers import INF, all_finite, autocast, loss_of, poison, same, small_model, weights
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.torch import LossScaler

functional = nn.functional


def spirals(rows: int = 128) -> tuple[Tensor, Tensor]:
    """Returns points of two classes that no line separates."""
    angle = torch.rand(rows) * 6
    label = torch.arange(rows) % 2
    turned = angle + 3.14159 * label
    return torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 6, label


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def half_precision() -> torch.autocast:
    return autocast(dtype=torch.float16)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("loss_weight", [1.0, 1e-7], ids=["normal losses", "tiny losses"])
def test_fp16_autocast_learns_even_where_its_gradients_would_vanish(fused: bool, loss_weight: float) -> None:
    model, (x, label) = classifier(), spirals()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-16, fused=fused)
    scaler = LossScaler(model)
    loss = torch.zeros(())
    for _ in range(120):
        with half_precision():
            loss = functional.cross_entropy(model(x), label) * loss_weight
        scaler.backward(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert loss.item() / loss_weight < 0.2
    assert scaler.metrics()["skip_rate"] < 0.1


def test_tiny_losses_teach_fp16_nothing_without_a_scale() -> None:
    model, (x, label) = classifier(), spirals()
    scaler = LossScaler(model, NoScaling())
    with half_precision():
        loss = functional.cross_entropy(model(x), label) * 1e-7
    scaler.backward(loss)
    assert not any(grad.any() for grad in (p.grad for p in model[0].parameters()) if grad is not None)


def test_accumulation_learns_and_skips_a_window_with_one_bad_micro_batch() -> None:
    model, (x, label) = classifier(), spirals()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = LossScaler(model, Dynamic(init_scale=256.0, growth_interval=10))
    skipped = 0
    for step in range(80):
        for part in range(4):
            with half_precision():
                loss = functional.cross_entropy(model(x[part::4]), label[part::4]) / 4
            scaler.backward(loss)
            if step == 40 and part == 1:
                poison(model[0].weight)
        skipped += scaler.step(optimizer, clip_norm=1.0).skipped()
        optimizer.zero_grad()
    assert skipped == 1
    assert functional.cross_entropy(model(x), label).item() < 0.3


def test_several_losses_are_worth_what_their_sum_is() -> None:
    def run(separately: bool) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = LossScaler(model, Dynamic(growth_interval=2))
        for step in range(10):
            first, second = loss_of(model, step), loss_of(model, step + 100)
            if separately:
                for scaled in scaler.scale((first, second)):
                    scaled.backward(retain_graph=True)
            else:
                scaler.backward(first + second)
            scaler.step(optimizer)
            optimizer.zero_grad()
        return weights(model)

    for one, other in zip(run(separately=True), run(separately=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gan_losses(generator: nn.Module, discriminator: nn.Module, noise: Tensor) -> Iterator[Tensor]:
    real = torch.randn(64, 1) * 0.5 + 3.0
    with half_precision():
        fake = generator(noise)
        yield (
            functional.softplus(-discriminator(real)).mean() + functional.softplus(discriminator(fake.detach())).mean()
        )
        yield functional.softplus(-discriminator(fake)).mean()


def test_a_gan_with_one_scaler_learns_the_mean_of_its_data() -> None:
    generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    discriminator = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 1))
    of_g = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.9), fused=True)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.9), foreach=True)
    scaler = LossScaler([generator, discriminator])
    scaler.protect_buffers()
    for _ in range(200):
        losses = gan_losses(generator, discriminator, torch.randn(64, 4))
        of_d.zero_grad()
        scaler.backward(next(losses))
        scaler.step(of_d)
        of_g.zero_grad()
        scaler.backward(next(losses))
        scaler.step(of_g)
    mean = generator(torch.randn(512, 4)).mean().item()
    assert 2.0 < mean < 4.0


def test_two_models_may_be_stepped_together_from_one_backward_pass() -> None:
    encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, fused=True) for model in (encoder, decoder)]
    scaler = LossScaler([encoder, decoder])
    x = torch.randn(64, 2) @ torch.randn(2, 4)
    losses = []
    for _ in range(150):
        with half_precision():
            loss = functional.mse_loss(decoder(encoder(x)), x)
        losses.append(loss.item())
        scaler.backward(loss)
        scaler.step(*optimizers, clip_norm=1.0)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert losses[-1] < losses[0] / 10


def test_a_gradient_penalty_trains_a_critic_with_slope_one() -> None:
    critic = nn.Sequential(nn.Linear(1, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, fused=True)
    scaler = LossScaler(critic)
    for _ in range(150):
        x = torch.randn(64, 1, requires_grad=True)
        with half_precision():
            (slope,) = scaler.grad(critic(x).float().sum(), x, create_graph=True)
            assert slope is not None
            loss = (slope.norm(dim=1) - 1).square().mean()
        scaler.backward(loss)
        scaler.step(optimizer)
        optimizer.zero_grad()
    x = torch.linspace(-1, 1, 9)[:, None].requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x)
    assert (slope.abs() - 1).abs().max().item() < 0.15


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_compiled_model_gives_the_weights_of_the_one_that_is_not() -> None:
    torch._dynamo.reset()

    def run(compiled: bool) -> tuple[list[Tensor], list[str]]:
        model = small_model()
        runner = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = LossScaler(runner, Dynamic(growth_interval=2))  # type: ignore[arg-type]
        for step in range(4):
            scaler.backward(loss_of(runner, step), retries=1)  # type: ignore[arg-type]
            if step == 3:
                poison(model[2].bias)
            scaler.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()
        assert scaler.last is not None
        return weights(model), [culprit.name.removeprefix("_orig_mod.") for culprit in scaler.last.culprits()]

    found, expected = run(compiled=True), run(compiled=False)
    assert same(found[0], expected[0])
    assert found[1] == expected[1] == ["2.bias"]


@pytest.mark.parametrize("policy", [NoScaling(), Static(1.0)])
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_without_scaling_a_loop_is_the_plain_loop(policy: Policy, arguments: dict[str, float], fused: bool) -> None:
    model = small_model()
    plain = copy.deepcopy(model)
    optimizer, its_optimizer = (torch.optim.AdamW(m.parameters(), fused=fused) for m in (model, plain))
    scaler = LossScaler(model, policy)
    for step in range(4):
        scaler.backward(loss_of(model, step))
        scaler.step(optimizer, **arguments)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss_of(plain, step).backward()
        if "clip_norm" in arguments:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if "clip_value" in arguments:
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        its_optimizer.step()
        its_optimizer.zero_grad()
    for one, other in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_without_scaling_nothing_is_checked() -> None:
    model = small_model()
    scaler = LossScaler(model, NoScaling())
    scaler.backward(loss_of(model))
    poison(model[0].weight, INF)
    assert scaler.step(torch.optim.SGD(model.parameters())).poll() is True
    assert not all_finite(model.parameters())
    scaler.step(torch.optim.SGD(model.parameters()))
