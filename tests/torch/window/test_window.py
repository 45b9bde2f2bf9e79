"""The order of calls: what a step may follow, and errors for gradients whose scale is not known."""

import pickle
from contextlib import nullcontext

import pytest
import torch
from tests.torch.helpers import INF, NAN, loss_of, poison, same, small_model, weights
from torch import nn

from gradscale import Dynamic, Static
from gradscale.torch import LossScaler
from gradscale.torch.ranks.round import Rounds

pytestmark = pytest.mark.usefixtures("either_way")

NOT_SCALED = r"none was scaled since the last step\. Call `scaler\.backward\(loss\)`"
NOT_RUN = r"no backward pass has been run since the loss was scaled\. Call"
STALE = r"Gradients from before the last step are still there.*Call `optimizer\.zero_grad\(\)` after every step"


def setup(growth_interval: int = 1, fused: bool = True) -> tuple[nn.Sequential, torch.optim.Optimizer, LossScaler]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return model, optimizer, LossScaler(model, Dynamic(init_scale=256.0, growth_interval=growth_interval))


def test_a_step_before_anything_was_scaled_is_refused() -> None:
    _, optimizer, scaler = setup()
    with pytest.raises(RuntimeError, match=NOT_SCALED):
        scaler.step(optimizer)


def test_a_step_after_an_unscaled_backward_pass_is_refused() -> None:
    model, optimizer, scaler = setup()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=NOT_SCALED):
        scaler.step(optimizer)


def test_a_step_before_the_backward_pass_is_refused_and_can_be_made_up_for() -> None:
    model, optimizer, scaler = setup()
    scaled = scaler.scale(loss_of(model))
    with pytest.raises(RuntimeError, match=NOT_RUN):
        scaler.step(optimizer)
    scaled.backward()
    assert not scaler.step(optimizer).skipped()


@pytest.mark.parametrize("fused", [True, False])
def test_a_second_step_is_refused_and_changes_nothing(fused: bool) -> None:
    model, optimizer, scaler = setup(fused=fused)
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    before, saved = weights(model), scaler.state_dict()
    with pytest.raises(RuntimeError, match=NOT_SCALED):
        scaler.step(optimizer)
    assert same(weights(model), before)
    assert scaler.state_dict() == saved


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
def test_gradients_that_were_never_cleared_are_refused_by_name(fused: bool, skipped: bool) -> None:
    model, optimizer, scaler = setup(fused=fused)
    scaler.backward(loss_of(model))
    if skipped:
        poison(model[0].weight)
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    before, saved = weights(model), scaler.state_dict()
    with pytest.raises(RuntimeError, match=rf"{STALE[:50]}.*Parameters: 0\.weight, 0\.bias, 2\.weight, 2\.bias\."):
        scaler.step(optimizer)
    assert same(weights(model), before)
    assert scaler.state_dict() == saved


def replace_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Does what some optimizers do, and hooks of others: makes new gradients from those it is given."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = parameter.grad - parameter.grad.mean()


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_the_step_itself_replaced_must_be_cleared_too(fused: bool) -> None:
    model, optimizer, scaler = setup(fused=fused)
    optimizer.register_step_pre_hook(replace_gradients)
    for _ in range(2):
        scaler.backward(loss_of(model))
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_whose_ranks_cannot_agree_is_over_and_its_gradients_must_be_cleared(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_connection(*_: object, **__: object) -> None:
        raise ConnectionError("a rank is gone")

    model, optimizer, scaler = setup(fused=fused)
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    before, saved = weights(model), scaler.state_dict()
    with monkeypatch.context() as patched:
        patched.setattr(Rounds, "ranks", 2)
        patched.setattr("torch.distributed.is_initialized", lambda: True)
        patched.setattr("torch.distributed.all_reduce", lose_connection)
        with pytest.raises(ConnectionError):
            scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=NOT_SCALED):  # some gradients may be divided already
        scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)
    assert same(weights(model), before)
    assert scaler.state_dict() == saved


def test_after_an_error_the_loop_can_continue() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_after_a_refusal_clearing_in_place_is_enough() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=False)
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_gradients_of_a_parameter_that_no_optimizer_has_stepped_yet_are_left_over_too() -> None:
    stepped, unstepped = nn.Linear(1, 1), nn.Linear(1, 1)
    scaler = LossScaler([stepped, unstepped], Dynamic(growth_interval=1))
    scaler.backward(unstepped(stepped(torch.ones(1, 1))).sum())
    scaler.step(torch.optim.SGD(stepped.parameters()))
    scaler.backward(unstepped(torch.ones(1, 1)).sum())
    with pytest.raises(RuntimeError, match=r"Parameters: 1\.weight, 1\.bias\."):
        scaler.step(torch.optim.SGD(unstepped.parameters()))


def test_gradients_that_were_refused_once_are_refused_until_they_are_cleared() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    for _ in range(3):
        scaler.backward(loss_of(model))
        with pytest.raises(RuntimeError, match=STALE):
            scaler.step(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_clearing_in_place_is_clearing(set_to_none: bool, fused: bool) -> None:
    model, optimizer, scaler = setup(fused=fused)
    for step in range(4):
        scaler.backward(loss_of(model, step))
        if step == 1:
            poison(model[0].weight)
        scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)
    assert scaler.metrics()["applied"] == 3


@pytest.mark.parametrize("factor", [2.0, INF])
def test_edits_of_gradients_that_were_never_cleared_do_not_hide_them(factor: float) -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    for each in model.parameters():
        each.grad.mul_(factor)  # type: ignore[union-attr]
    before = weights(model)
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)
    assert same(weights(model), before)


def test_replacing_gradients_that_were_never_cleared_does_not_hide_them() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    for each in model.parameters():
        each.grad = each.grad * 0.5  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_gradients_that_were_never_cleared_are_refused_after_a_backward_pass_that_has_raised() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)

    inputs = torch.ones(1, next(model.parameters()).shape[1], requires_grad=True)
    inputs.register_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaler.backward(model(inputs).sum())
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_a_scaler_is_copied_after_a_load_that_discards_a_backward_pass_that_has_raised() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)

    loss = loss_of(model)
    loss.register_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaler.backward(loss)
    scaler.load_state_dict(scaler.state_dict())
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied.loss_scale == scaler.loss_scale


def _interrupt(grad: torch.Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.not_simulated("compiled autograd")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch itself
@pytest.mark.parametrize("cleared", [True, False])
def test_gradients_that_were_never_cleared_are_refused_after_a_compiled_backward_pass(cleared: bool) -> None:
    from torch._dynamo import compiled_autograd

    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    if cleared:
        optimizer.zero_grad()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        scaler.backward(loss_of(model))
    with nullcontext() if cleared else pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)


def test_a_group_added_inside_unscaled_with_gradients_that_were_never_cleared_is_refused_although_edited() -> None:
    model, _, scaler = setup()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    with scaler.unscaled(optimizer):
        optimizer.add_param_group({"params": model[2].parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"Parameters: 2\.weight, 2\.bias\."):
        scaler.step(optimizer)


def test_zeros_in_place_of_gradients_that_were_never_cleared_may_be_stepped() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    optimizer.zero_grad(set_to_none=False)
    before = weights(model)
    assert not scaler.step(optimizer).skipped()
    assert same(weights(model), before)


def test_gradients_of_which_only_some_were_cleared_are_refused_by_name() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    model[0].zero_grad()
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"Parameters: 2\.weight, 2\.bias\."):
        scaler.step(optimizer)


def test_a_generator_may_fill_the_gradients_of_a_discriminator_that_clears_them_later() -> None:
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator))
    scaler = LossScaler([generator, discriminator], Dynamic(init_scale=4.0, growth_interval=1))
    for _ in range(3):
        of_d.zero_grad()
        scaler.backward(discriminator(generator(torch.ones(1, 2)).detach()).sum())
        assert not scaler.step(of_d).skipped()
        of_g.zero_grad()
        scaler.backward(-discriminator(generator(torch.ones(1, 2))).sum())
        assert not scaler.step(of_g).skipped()


def test_gradients_that_another_models_step_left_behind_are_refused() -> None:
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator))
    scaler = LossScaler([generator, discriminator], Dynamic(init_scale=4.0, growth_interval=1))
    scaler.backward(discriminator(torch.ones(1, 2)).sum())
    scaler.step(of_d)
    of_d.zero_grad()
    scaler.backward(-discriminator(generator(torch.ones(1, 2))).sum())
    scaler.step(of_g)
    scaler.backward(discriminator(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"Parameters: 1\.weight, 1\.bias\."):
        scaler.step(of_d)


def test_gradients_cleared_between_two_backward_passes_of_a_step_are_not_left_over() -> None:
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    of_a, of_b = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (a, b))
    scaler = LossScaler([a, b], Static(4.0))
    for _ in range(2):
        of_a.zero_grad()
        scaler.backward(a(torch.ones(1, 2)).sum())
        of_b.zero_grad()
        scaler.backward(b(torch.ones(1, 2)).sum())
        scaler.step(of_a, of_b)
    assert scaler.metrics()["applied"] == 2


def test_a_bad_gradient_may_be_cleared_before_the_step() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    poison(model[0].weight, INF)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_a_backward_pass_that_raises_can_be_followed_by_another() -> None:
    model, optimizer, scaler = setup()
    loss = loss_of(model)
    loss.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        scaler.backward(loss)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_a_loss_without_a_graph_raises_what_torch_raises_and_the_loop_can_continue() -> None:
    model, optimizer, scaler = setup()
    with torch.no_grad():
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.backward(loss)
    scaler.backward(loss_of(model))
    assert not scaler.step(optimizer).skipped()


def test_a_step_may_be_taken_without_gradients_enabled() -> None:
    model, optimizer, scaler = setup()
    for _ in range(2):
        scaler.backward(loss_of(model))
        with torch.no_grad():
            assert not scaler.step(optimizer, clip_norm=1.0).skipped()
        optimizer.zero_grad()


def test_a_step_or_a_checkpoint_inside_inference_mode_does_not_break_the_next_backward_pass() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    with torch.inference_mode():
        scaler.step(optimizer)
        scaler.load_state_dict(scaler.state_dict())
        optimizer.zero_grad()
    x = torch.ones(1, 4, requires_grad=True)
    (grad,) = scaler.grad(model(x).sum(), x, create_graph=True)
    assert grad is not None
    scaler.backward(loss_of(model) + grad.sum())
    assert not scaler.step(optimizer).skipped()


def test_a_head_that_joins_the_model_later_is_not_stepped_on_gradients_of_several_scales() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(model, Static(4.0))
    model.append(nn.Linear(2, 1))
    for _ in range(2):
        scaler.backward(model(torch.ones(1, 2)).sum())
        scaler.step(optimizer)
        optimizer.zero_grad()
    optimizer.add_param_group({"params": model[1].parameters()})
    scaler.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"Parameters: 1\.weight, 1\.bias\."):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(model(torch.ones(1, 2)).sum())
    assert not scaler.step(optimizer).skipped()


def test_gradients_that_a_step_has_refused_are_not_used_by_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in model)
    scaler = LossScaler(model, Static(4.0))

    def step() -> bool:
        scaler.backward(model(torch.ones(1, 2)).sum())
        return scaler.step(first, second).skipped()

    step()
    second.zero_grad()
    with pytest.raises(RuntimeError, match=r"Parameters: 0\.weight, 0\.bias\."):
        step()
    first.zero_grad()
    with pytest.raises(RuntimeError, match=r"Parameters: 1\.weight, 1\.bias\."):
        step()
    first.zero_grad()
    second.zero_grad()
    assert not step()


def test_gradients_of_an_unknown_module_that_were_cleared_may_be_stepped() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_c = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    scaler = LossScaler(policy=Static(4.0))
    for _ in range(2):
        scaler.backward(-critic(generator(torch.ones(1, 2))).sum())
        scaler.step(of_g)
        of_c.zero_grad()
        scaler.backward(critic(generator(torch.ones(1, 2))).sum())
        scaler.step(of_c)
        of_g.zero_grad()
        of_c.zero_grad()
    assert scaler.metrics()["applied"] == 4


@pytest.mark.parametrize(("known", "steps_before"), [(True, 0), (True, 1), (False, 1)])
def test_the_loss_of_a_batch_that_was_given_up_does_not_skip_the_next(known: bool, steps_before: int) -> None:
    model, optimizer, _ = setup()
    scaler = LossScaler(model if known else None, Dynamic(init_scale=256.0))
    for _ in range(steps_before):
        scaler.backward(loss_of(model))
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.backward(loss_of(model) + NAN)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).status() == "applied"


@pytest.mark.parametrize("known", [True, False], ids=["LossScaler(model)", "LossScaler()"])
def test_a_batch_whose_backward_pass_raised_is_given_up_too(known: bool) -> None:
    model, optimizer, _ = setup()
    scaler = LossScaler(model if known else None, Dynamic(init_scale=256.0))
    loss = loss_of(model) + NAN
    torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)
    optimizer.zero_grad()
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).status() == "applied"


@pytest.mark.parametrize("retries", [0, 2])
def test_a_bad_loss_of_an_earlier_micro_batch_still_skips_the_step(retries: int) -> None:
    model, optimizer, scaler = setup()
    before = weights(model)
    scaler.backward(loss_of(model) + NAN, retries=retries)
    for _ in range(2):
        scaler.backward(loss_of(model), retries=retries)
    assert scaler.step(optimizer).status() == "nonfinite_loss"
    assert same(weights(model), before)


def test_a_bad_loss_still_skips_the_step_if_only_other_gradients_were_cleared() -> None:
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    of_a, of_b = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (a, b))
    scaler = LossScaler([a, b], Static(4.0))
    scaler.backward(b(torch.ones(1, 2)).sum() + NAN)
    of_a.zero_grad()
    scaler.backward(a(torch.ones(1, 2)).sum())
    assert scaler.step(of_a, of_b).status() == "nonfinite_loss"


def test_a_loss_that_cannot_be_differentiated_or_is_not_does_not_skip_a_step() -> None:
    model, optimizer, scaler = setup()
    with torch.no_grad():
        scaler.scale(loss_of(model) * NAN)
    scaler.scale(loss_of(model) * NAN)
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).status() == "applied"


@pytest.mark.parametrize("known", [True, False], ids=["LossScaler(model)", "LossScaler()"])
def test_zeros_are_not_left_over_when_a_state_is_loaded(known: bool) -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=False)
    fresh = LossScaler(model if known else None, Dynamic())
    for loaded in (fresh, scaler):
        loaded.load_state_dict(scaler.state_dict())
        loaded.backward(loss_of(model))
        assert not loaded.step(optimizer).skipped()
        optimizer.zero_grad(set_to_none=False)


def test_gradients_from_before_a_load_are_left_over_unless_they_are_zeros() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    model[0].zero_grad(set_to_none=False)
    scaler.load_state_dict(scaler.state_dict())
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=r"Parameters: 2\.weight, 2\.bias\."):
        scaler.step(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_between_two_backward_passes_are_not_left_over(set_to_none: bool) -> None:
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    of_a, of_b = (torch.optim.SGD(model.parameters(), lr=1.0) for model in (a, b))
    scaler = LossScaler([a, b], Static(4.0))
    for _ in range(2):
        before = weights(a, b)
        of_a.zero_grad(set_to_none=set_to_none)
        scaler.backward(a(torch.ones(1, 2)).sum())
        of_b.zero_grad(set_to_none=set_to_none)
        scaler.backward(b(torch.ones(1, 2)).sum())
        scaler.step(of_a, of_b)
        assert same(weights(a, b), [weight - 1 for weight in before])


def test_gradients_left_over_are_refused_after_a_backward_pass_that_raised_too() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    scaler.backward(loss_of(model))
    loss = loss_of(model)
    torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match=STALE):
        scaler.step(optimizer)


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_losses_in_one_backward_pass_either_counts(bad: int) -> None:
    """The hook of the first to be reached must not be undone by that of the second: no gradient is there yet."""
    model, optimizer, scaler = setup()
    losses = [scaler.scale(loss_of(model, seed) * (NAN if seed == bad else 1.0)) for seed in (0, 1)]
    (losses[0] + losses[1]).backward()
    result = scaler.step(optimizer)
    assert (str(result.status()), result.next_scale.item()) == ("nonfinite_loss", 256.0)
