"""Faults of real trainings, and what health, `ScaleStuck` and doctor say of them: what is known, then what is likely.

One table: what each says, and what none of them may say, as no evidence is there for it.
"""

from dataclasses import dataclass

import pytest
import torch
from tests.torch.diagnosis import faults
from typer.testing import CliRunner, Result

from gradscale import Policy, Static
from gradscale.cli import app
from gradscale.engine.health import Condition, Health
from gradscale.torch import LossScaler, ScaleStuck

pytestmark = [
    pytest.mark.cpu_only("the trainings place their models there"),
    pytest.mark.filterwarnings("ignore:These parameters are FP16"),
]


@dataclass(frozen=True)
class Said:
    """What is said of a fault.

    Attributes:
        condition: that of the health of the run.
        health: parts of its advice, in their order.
        doctor: parts of what doctor prints, in their order.
        never: what neither says.
        healthy: whether doctor finds that nothing needs to be done.
    """

    condition: Condition
    health: tuple[str, ...]
    doctor: tuple[str, ...] = ()
    never: tuple[str, ...] = ("learning rate",)
    healthy: bool = False


IN_VAIN = ("retries", "Headroom()", "learning rate", "calibrating")
"""What cannot help against a loss that is not finite."""

WRITTEN = (
    "The largest weight, in ",
    "and was 0.499 before the first step.",
    "an update moves a weight by ",
    "Likely cause: something other than the optimizer has written to them",
)

TABLE = {
    "nan_batches": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 2 of 20 steps", "No scale, retry or policy can help", "batch"),
        ("Probe of step 10: broken_data: an input, float32 of shape [8, 4] is inf or NaN",),
        IN_VAIN,
    ),
    "log_of_zero": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 8 of 20 steps.",),
        ("Probe of step 2: undefined: `log` outside of the model is a logarithm of zero",),
        (*IN_VAIN, "bad_batch"),
    ),
    "all_labels_masked": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 3 of 20 steps.",),
        ("Probe of step 3: undefined: `nll_loss_forward` outside of the model is a mean over no label",),
        IN_VAIN,
    ),
    "overflows_now_and_then": Said(
        Condition.THRASHING,
        ("5 of 20 steps overflowed: embed.weight", "Look at the batch of a skipped step."),
        ("5 of 20 steps overflowed", "The probe below shows the operation.", "Probe of step 4: undefined"),
        ("Headroom()", "learning rate", "still being found"),
    ),
    "steep_adamw": Said(
        Condition.DIVERGING,
        (
            "The loss rose from 0.332 to ",
            " times.",
            "Likely cause: the learning rate (1) is too high.",
        ),
        ("diverging",),
        ("Nothing to do",),
    ),
    "steep_adamw_in_attention": Said(
        Condition.NONFINITE_LOSS,
        (
            "The loss was inf or NaN in ",
            " of 20 steps, and in all since step ",
            "and the weights grew ",
            " times.",
            "Likely cause: the learning rate (1) is too high.",
        ),
        ("broken_weights: The loss rose from 0.71 to ", "the learning rate (1) is too high"),
        ("scaled twice", "bad_batch"),
    ),
    "half_model": Said(
        Condition.BROKEN,
        (
            "in embed.weight, is nan after 1 update",
            "eps of 1e-08 is 0 in its float16 state",
            "`MasterWeights` or `prepare`",
        ),
        ("Warning: These parameters are FP16", "broken_weights: embed.weight is inf or NaN before the step", "eps of"),
    ),
    "inf_in_exp_avg": Said(
        Condition.BROKEN, ("The state of the optimizer is not finite: exp_avg of head.weight.",), never=("too high",)
    ),
    "inf_in_exp_avg_sq": Said(
        Condition.BROKEN, ("The state of the optimizer is not finite: exp_avg_sq of head.weight.",), never=("too high",)
    ),
    "doubled_weights": Said(
        Condition.BROKEN, WRITTEN, ("Something other than the optimizer", "before step 5."), ("too high",)
    ),
    "doubled_weights_sgd": Said(
        Condition.BROKEN,  # updates of SGD may be of any size: only doctor, which looks between steps, can exclude them
        (*WRITTEN[:2], "too high, or something other than the optimizer writes to the weights."),
        ("Something other than the optimizer", "before step 5."),
        ("MasterWeights",),
    ),
    "embedding_row": Said(
        Condition.NONFINITE_LOSS,
        ("A weight of embed.weight is 1e+06, and FP16 ends at 65504.",),
        ("broken_weights: a weight of embed.weight is 1e+06",),
        (*IN_VAIN, "bad_batch"),
    ),
    "raw_uint16": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 18 of 20 steps",),
        ("Probe of step 1: forward_overflow: the forward pass overflows float16 in `_to_copy` in embed", "6.55e+04"),
        (*IN_VAIN, "bad_batch"),
    ),
    "standard_deviation_of_zero": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 3 of 20 steps.",),
        ("undefined: `div` outside of the model is a division by zero.", "constant.std()"),
        (*IN_VAIN, "forward_overflow"),
    ),
    "custom_function": Said(
        Condition.CALIBRATING,
        (),
        ("underflowing", "are zero at a scale of 2**-", "% of that of head.weight"),
        ("Nothing to do",),
    ),
    "dead_relu": Said(
        Condition.UNDERFLOWING,
        ("All gradients are zero at a scale of", "or are zero in float32 too"),
        ("zero_gradients", "They are zero without a scale too, and none can help.", "dead ReLU"),
        ("Raise the scale",),
    ),
    # Ten more, and a training without a fault whose gradients need a scale below 1.
    "masked_row": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 20 of 20 steps.",),
        ("undefined: `_softmax` in parts.1 (Masked) is a softmax over a row that is masked as a whole.",),
        IN_VAIN,
    ),
    "bad_running_statistics": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 20 of 20 steps.",),
        ("broken_weights: norm.running_var is inf or NaN before the step",),
        IN_VAIN,
    ),
    "steep_sgd": Said(
        Condition.BROKEN,
        ("The largest weight, in head.weight, is 176", "Likely cause: the learning rate (300) is too high"),
        ("the learning rate (300) is too high",),
        ("Something other",),
    ),
    "infinite_hook": Said(
        Condition.STUCK,
        ("The gradient of one parameter, 'head.bias', overflows.", "hooks"),
        ("undefined: `mul` outside of the model", "register_hook(lambda grad: grad * math.inf)"),
        ("Likely cause", "learning rate"),
    ),
    "loaded_in_between": Said(
        Condition.BROKEN, WRITTEN, ("Something other than the optimizer", "before step 4."), ("too high",)
    ),
    "exponential": Said(
        Condition.NONFINITE_LOSS,
        ("The loss was inf or NaN in 20 of 20 steps.",),
        (
            "undefined: `exp` outside of the model is an exponential of a number that is too large.",
            "subtract the largest argument",
        ),
        IN_VAIN,
    ),
    "norm_at_zero": Said(
        Condition.STUCK,
        (
            "Every gradient is inf or NaN although the loss is finite.",
            "Likely cause: a division, a sqrt or a norm at zero",
        ),
        ("undefined: `div` outside of the model", ".sqrt().mean()"),
    ),
    "weight_decay": Said(
        Condition.BROKEN,
        ("The largest weight, in ", "Learning rate times weight decay is 10: it multiplies weights by -9. Lower it."),
        (),
        ("Something other", "is too high"),
    ),
    "eps_of_zero": Said(
        Condition.BROKEN, ("in embed.weight, is nan", "eps of 0 is 0 in its float32 state"), (), ("too high", "Master")
    ),
    "nan_written": Said(
        Condition.BROKEN, ("in head.bias, is nan", *WRITTEN[2:]), ("first before step 6.",), ("too high",)
    ),
    "healthy": Said(Condition.OK, ("Nothing to do.",), healthy=True),
    "large_sum": Said(Condition.CALIBRATING, (), healthy=True),
    "sparse": Said(Condition.OK, ("Nothing to do.",), healthy=True),
}


def run(name: str, policy: Policy | str = "auto", steps: int = 20) -> tuple[Health, list[ScaleStuck]]:
    """Returns the health of a run after its last step, and the first report that it is stuck."""
    model, batches, loss_fn, optimizer = getattr(faults, name)()
    stuck: list[ScaleStuck] = []
    scaler = LossScaler(model, policy, on_stuck=stuck.append, max_consecutive_skips=5)
    for _, batch in zip(range(steps), list(batches) * (steps // 20 + 1), strict=False):
        scaler.backward(loss_fn(model, batch))
        scaler.step(optimizer)
        optimizer.zero_grad()
    return scaler.health(), stuck


def run_doctor(name: str) -> Result:
    return CliRunner().invoke(app, ["doctor", f"tests.torch.diagnosis.faults:{name}"], env={"COLUMNS": "2000"})


def check_order(text: str, parts: tuple[str, ...]) -> None:
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not in {text[at:]!r}"
        at = found + len(part)


def test_every_fault_is_in_the_table() -> None:
    made = {
        name for name, each in vars(faults).items() if getattr(each, "__annotations__", {}) == {"return": faults.Made}
    }
    assert made == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_health_says_what_is_known_and_then_what_is_likely(name: str) -> None:
    said = TABLE[name]
    health, _ = run(name)
    assert health.condition is said.condition, str(health)
    check_order(health.advice, said.health)
    if said.condition is not Condition.CALIBRATING:
        assert [each for each in said.never if each in str(health)] == []


@pytest.mark.parametrize("name", TABLE)
def test_doctor_says_the_same_and_probes_the_first_step_of_the_fault(name: str) -> None:
    said = TABLE[name]
    found = run_doctor(name)
    assert found.exit_code == (0 if said.healthy else 1), found.output
    check_order(found.output, said.doctor)
    assert [each for each in said.never if each in found.output] == []


@pytest.mark.parametrize(
    "name", [name for name, said in TABLE.items() if said.condition in (Condition.BROKEN, Condition.STUCK)]
)
def test_a_stuck_run_is_raised_with_the_cause_that_health_finds(name: str) -> None:
    said = TABLE[name]
    _, stuck = run(name)
    if name != "inf_in_exp_avg_sq":  # whose steps are applied
        check_order(str(stuck[0]), ("5 steps in a row" if said.condition is Condition.BROKEN else " steps in a row",))
        check_order(stuck[0].cause, said.health)
        assert [each for each in said.never if each in str(stuck[0])] == []


def test_a_learning_rate_that_made_the_forward_pass_overflow_is_named_by_the_stuck_check() -> None:
    _, stuck = run("steep_adamw_in_attention")
    check_order(str(stuck[0]), ("the loss is inf or NaN since step ", "Likely cause: the learning rate (1) is too"))


def test_gradients_that_are_zero_at_a_huge_scale_are_not_blamed_on_it() -> None:
    health, _ = run("dead_relu", Static(2.0**48))
    assert health.condition is Condition.ZERO_GRADIENTS
    assert "They are zero without a scale too, and none can help." in health.advice


def test_a_loss_that_was_scaled_twice_is_known_exactly() -> None:
    model, batches, loss_fn, optimizer = faults.healthy()
    scaler = LossScaler(model)
    for batch in batches:
        scaler.backward(scaler.scale(loss_fn(model, batch)))
        scaler.step(optimizer)
        optimizer.zero_grad()
    health = scaler.health()
    assert health.condition is Condition.SCALED_TWICE
    check_order(health.advice, ("A loss was scaled twice: one is exactly another one times the scale of",))


def test_what_a_probe_has_found_takes_the_place_of_what_is_likely() -> None:
    model, batches, loss_fn, optimizer = faults.norm_at_zero()
    scaler = LossScaler(model, Static(1.0), on_stuck="ignore")
    for batch in batches:
        scaler.backward(loss_fn(model, batch))
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert "Likely cause" in scaler.health().advice
    scaler.probe(lambda: loss_fn(model, faults.rows()))
    advice = scaler.health().advice
    check_order(advice, ("Every gradient is inf or NaN", "A probe found undefined: `div` outside of the model"))
    assert "Likely cause" not in advice


def test_a_learning_rate_is_not_blamed_for_weights_that_grow_while_the_loss_falls() -> None:
    model, batches, _, _ = faults.healthy()
    far = lambda model, x: (faults.half_pass(model, x) - 40).square().mean()  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    scaler = LossScaler(model)
    for batch in batches:
        scaler.backward(far(model, batch))
        scaler.step(optimizer)
        optimizer.zero_grad()
    health = scaler.health()
    assert float(health.evidence["weights_growth"]) > 3
    assert health.condition is Condition.OK, str(health)
