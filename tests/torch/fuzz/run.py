"""Runs programs, and makes failing ones shorter."""

import warnings
from dataclasses import replace

import torch
from tests.torch.fuzz.compare import differences
from tests.torch.fuzz.draw import draw
from tests.torch.fuzz.operations import Program
from tests.torch.fuzz.outcome import Undefined
from tests.torch.fuzz.reference import Reference
from tests.torch.fuzz.subject import Subject

MOST_RUNS = 200
"""Bound of the runs that making a program shorter may take."""


def failure(program: Program) -> str | None:
    """Returns what differs after the first operation that is wrong; None if gradscale does what it should.

    A program ends where what should happen is not defined.
    """
    # Off explicitly: where nobody has chosen, torch warns once of a process that the checks are off.
    with torch.sparse.check_sparse_tensor_invariants(enable=False), warnings.catch_warnings():
        # `torch.load` of torch 2.15 checks them all the same, and warns that this takes time.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return _failure(program)


def _failure(program: Program) -> str | None:
    torch.manual_seed(0)
    reference, subject = Reference(program.setup), Subject(program.setup)
    for index, operation in enumerate(program.operations):
        try:
            expected = reference.run(operation)
        except Undefined:
            return None
        numbers = torch.get_rng_state()
        try:
            found = subject.run(operation)
        except Exception as error:
            return f"after {index}: {type(error).__name__}: {error}"
        lines = list(differences(reference, subject, expected, found))
        if not torch.equal(numbers, torch.get_rng_state()):
            lines.append("torch's random numbers were drawn from")
        if lines:
            return f"after {index}: " + "\n  ".join(lines)
    return None


def shortened(program: Program) -> Program:
    """Returns a failing program without the operations, parameters' faults aside, that its failure does not need."""
    runs, kind = 0, _kind(program)
    size = max(1, len(program.operations) // 2)
    while size and runs < MOST_RUNS:
        start = 0
        while start < len(program.operations) and runs < MOST_RUNS:
            kept = program.operations[:start] + program.operations[start + size :]
            runs += 1
            if _kind(shorter := replace(program, operations=kept)) == kind:
                program = shorter
            else:
                start += size
        size //= 2
    return program


def _kind(program: Program) -> str | None:
    """Returns the kind of a program's failure, by the words before the numbers: a shorter program must fail alike."""
    found = failure(program)
    return found and " ".join(found.split()[2:4])


def report(seed: int, *, shorten: bool = True) -> str | None:
    """Returns a description of the failure of a seed's program, which says how to run it again; None if it passes."""
    program = draw(seed)
    found = failure(program)
    if found is None:
        return None
    if shorten:
        program = shortened(program)
        found = failure(program)
    return f"seed {seed}: {found}\n{program}\nRun it again: python -m tests.torch.fuzz {seed}"
