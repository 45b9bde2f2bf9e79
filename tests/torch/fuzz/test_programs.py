"""Random training programs give what a plain loop without scaling gives."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.torch.fuzz import operations as ops
from tests.torch.fuzz.draw import draw
from tests.torch.fuzz.operations import Operation, Program
from tests.torch.fuzz.optimizers import OPTIMIZERS
from tests.torch.fuzz.outcome import Undefined
from tests.torch.fuzz.policies import POLICIES
from tests.torch.fuzz.reference import Reference
from tests.torch.fuzz.run import failure, report, shortened
from tests.torch.versions import ADAGRAD_TAKES_GROUPS

from gradscale.kernels.torch_storage import Full
from gradscale.torch import LossScaler, host
from gradscale.torch.step import apply, measure
from gradscale.torch.window import buffers, retry, window

pytestmark = pytest.mark.not_simulated("sparse tensors, and thousands of steps")

ORDINARY, SLOW = 300, 2600
CHUNK = 50


def _all_pass(first: int, count: int) -> None:
    found = (report(seed) for seed in range(first, first + count))
    failed = next(filter(None, found), None)
    assert failed is None, failed


@pytest.mark.parametrize("first", range(0, ORDINARY, CHUNK))
def test_a_random_program_trains_as_a_plain_loop_does(first: int) -> None:
    _all_pass(first, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(ORDINARY, ORDINARY + SLOW, CHUNK))
def test_many_random_programs_train_as_a_plain_loop_does(first: int) -> None:
    _all_pass(first, CHUNK)


def _ignored(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gradients are not divided": (apply, "multiply", _ignored),
    "no overflow is seen": (measure, "multiply_and_check", lambda gradients, *rest: {}),
    "stale gradients are not refused": (window, "refuse_stale", _ignored),
    "buffers are not restored": (buffers.BufferGuard, "settle", _ignored),
    "a retry keeps the scale": (host.Rule, "lowered", lambda self, state: state),
    "gradients of a failed attempt are kept": (retry.Stash, "clear", _ignored),
    "the rule forgets what it saw": (host, "rule_on_host", lambda policy: lambda state, seen: state),
    "masters are not rounded into the weights": (Full, "write", _ignored),
    "loading does nothing": (LossScaler, "load_state_dict", _ignored),
    "momentum starts uninitialized": (apply, "_create_momentum", _ignored),
}
"""Faults planted in gradscale: where, the name of the function, and what replaces it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_gradscale_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)

    assert any(failure(draw(seed)) for seed in range(ORDINARY))


def test_a_failing_program_is_made_shorter_and_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "multiply", _ignored)
    program = next(program for program in map(draw, range(ORDINARY)) if failure(program))

    shorter = shortened(program)

    assert failure(shorter) is not None
    assert len(shorter.operations) < len(program.operations)
    assert not any(failure(_without(shorter, index)) for index in range(len(shorter.operations)))


def _without(program: Program, index: int) -> Program:
    return Program(program.setup, program.operations[:index] + program.operations[index + 1 :])


def test_a_report_has_the_program_and_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "multiply", _ignored)
    found = next(found for seed in range(ORDINARY) if (found := report(seed)))

    assert "Operations:" in found
    assert "Step(" in found
    assert "python -m tests.torch.fuzz" in found


def test_a_seed_gives_the_same_program_again() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_programs_use_every_operation_optimizer_and_policy() -> None:
    programs = [draw(seed) for seed in range(ORDINARY)]
    operations = {
        type(inner) for program in programs for operation in program.operations for inner in _within(operation)
    }

    assert operations == set(Operation.__subclasses__())
    kinds = {kind for kind in OPTIMIZERS if ADAGRAD_TAKES_GROUPS or not kind.startswith("adagrad")}
    assert {optimizer.kind for program in programs for optimizer in program.setup.optimizers} == kinds
    assert {program.setup.policy for program in programs} == set(POLICIES)


def _within(operation: Operation) -> tuple[Operation, ...]:
    return (operation, *(operation.inside if isinstance(operation, ops.Unscaled) else ()))


def test_few_programs_end_where_nothing_is_defined() -> None:
    assert sum(map(_ends_early, map(draw, range(100)))) <= 3


def _ends_early(program: Program) -> bool:
    reference = Reference(program.setup)
    try:
        for operation in program.operations:
            reference.run(operation)
    except Undefined:
        return True
    return False
