"""What a run came to, from pytest's closing line."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.matrix.outcome import Counts, counts_of, judged


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("12 passed in 3.21s", Counts(passed=12)),
        ("12 passed, 3 skipped, 40 deselected, 1 warning in 61.02s (0:01:01)", Counts(passed=12, skipped=3)),
        ("2 failed, 10 passed, 1 xfailed, 3 errors in 1.00s", Counts(passed=10, failed=5, xfailed=1)),
        ("1 failed, 1 error in 0.10s", Counts(failed=2)),
        ("====== 1 passed, 1 xpassed in 0.1s ======", Counts(passed=1, failed=1)),
        ("5 skipped in 0.10s", Counts(skipped=5)),
    ],
)
def test_the_closing_line_gives_the_counts(line: str, counts: Counts) -> None:
    assert counts_of(f".......\nFAILED tests/a.py::b - 7 passed of 9\n{line}\n") == counts


def test_the_last_line_of_the_form_counts() -> None:
    assert counts_of("9 failed in 1.00s\n1 passed in 2.00s\nbye\n") == Counts(passed=1)


@pytest.mark.parametrize("output", ["", "Fatal Python error: Aborted", "E  7 passed of 9", "no tests ran in 0.01s"])
def test_a_run_that_did_not_get_to_its_end_has_no_counts_and_failed(output: str) -> None:
    assert counts_of(output) is None
    assert judged(-6, output) == ("failed", None, "pytest ended with -6 and no counts")


def test_only_exit_code_0_with_a_test_that_passed_is_a_pass() -> None:
    assert judged(0, "3 passed, 1 skipped in 1.00s")[0] == "passed"
    assert judged(0, "4 skipped in 1.00s")[0] == "failed"
    assert judged(1, "3 passed in 1.00s")[0] == "failed"
    assert judged(1, "3 passed, 1 failed in 1.00s")[0] == "failed"


def test_what_pytest_prints_is_read(tmp_path: Path) -> None:
    test = tmp_path / "test_three.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()\ndef test_c(): raise ValueError\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(test)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert judged(ended.returncode, ended.stdout) == ("failed", Counts(passed=1, skipped=1, failed=1), "")
