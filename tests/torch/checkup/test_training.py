"""`gradscale doctor MODULE:FUNCTION` on trainings with a fault, and on one without."""

import json

import pytest
from typer.testing import CliRunner, Result

from gradscale.cli import app

pytestmark = pytest.mark.cpu_only("the trainings place their models there")


def doctor(name: str, *options: str) -> Result:
    path = name if ":" in name else f"tests.torch.checkup.trainings:{name}"
    return CliRunner().invoke(app, ["doctor", path, *options], env={"COLUMNS": "200"})


def test_a_healthy_training_exits_with_zero() -> None:
    found = doctor("healthy", "--steps", "25")
    assert found.exit_code == 0
    assert "25 steps, 0 skipped" in found.output
    assert "Health: ok: 25 updates in 25 steps. Nothing to do." in found.output
    assert "Probe" not in found.output


def test_a_weight_that_is_nan_is_named() -> None:
    found = doctor("nan_weight", "--steps", "3")
    assert found.exit_code == 1
    assert "Health: broken" in found.output
    assert "broken_weights: embed.weight is inf or NaN before the step" in found.output


def test_an_overflow_of_the_forward_pass_is_named_with_its_line() -> None:
    found = doctor("softmax_overflow", "--steps", "3")
    assert found.exit_code == 1
    assert "forward_overflow" in found.output
    assert "in parts.1 (Attention)" in found.output
    assert "scores = self.query" in found.output


def test_a_learning_rate_that_is_too_high_is_named() -> None:
    found = doctor("steep_learning_rate", "--steps", "10")
    assert found.exit_code == 1
    assert "the learning rate (1e+06) is too high" in found.output


def test_gradients_that_underflow_are_found() -> None:
    found = doctor("tiny_loss", "--policy", "static:1")
    assert found.exit_code == 1
    assert "Health: underflowing" in found.output
    assert doctor("tiny_loss").exit_code == 0  # the default policy follows them


def test_a_batch_with_nan_is_found_although_the_run_went_on() -> None:
    found = doctor("one_nan_batch")
    assert found.exit_code == 1
    assert "20 steps, 1 skipped" in found.output
    assert "Probe of step 5: broken_data: an input, float32 of shape [8, 4] is inf or NaN" in found.output


def test_an_optimizer_without_gradients_is_found() -> None:
    found = doctor("optimizer_of_another_model", "--steps", "2")
    assert found.exit_code == 1
    assert "step 2: no_grads\n" in found.output
    assert "Health: stuck: 0 updates in 0 steps. No parameter of the optimizer has a gradient." in found.output
    assert "Probe" not in found.output


def test_a_scale_that_is_too_high_is_found_with_the_one_that_fits() -> None:
    found = doctor("healthy", "--policy", "static:2**40", "--steps", "3")
    assert found.exit_code == 1
    assert "scale_too_high" in found.output


def test_json_has_the_diagnosis() -> None:
    found = json.loads(doctor("softmax_overflow", "--steps", "2", "--json").stdout)
    assert found["healthy"] is False
    assert found["losses"] == ["nan", "nan"]
    assert (found["probe"]["verdict"], found["probe"]["operation"]["module"]) == ("forward_overflow", "parts.1")
    assert json.loads(doctor("healthy", "--steps", "2", "--json").stdout)["probe"] is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a_model", "must return (model, batches, loss_fn)"),
        ("no_batches", "at least one batch"),
        ("loss_that_is_a_number", "`loss_fn` must return the loss: a tensor of one number"),
        ("missing", "must name a function"),
        ("no.such:thing", "must name a module"),
    ],
)
def test_what_is_no_training_is_one_line(name: str, says: str) -> None:
    found = doctor(name)
    assert found.exit_code == 2
    assert says in found.output
    assert found.output.count("\n") == 1


def test_an_error_of_the_users_function_keeps_its_traceback() -> None:
    assert isinstance(doctor("raises").exception, KeyError)


def test_a_training_and_a_device_exclude_each_other() -> None:
    found = doctor("healthy", "--device", "cpu")
    assert found.exit_code == 2
    assert "not both" in found.output


def test_the_health_of_the_run_is_printed_and_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    found = doctor("nan_weight")
    assert "Health: broken" in found.output
    assert caplog.records == []
