"""`python -m benchmarks.run`: what it prints, writes and ends with. No figure is asserted but those a test made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.busy import one_core_busy
from benchmarks.plots import BARS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

MADE_UP = """
from benchmarks.rows import Row, compared

def rows(quick):
    return [
        compared("slow", "peer", [3.0, 3.0, 6.0], [4.0, 4.0, 4.0], 0.7),
        compared("fast", "peer", [1.0, 1.0, 1.0], [4.0, 2.0, 4.0], 0.7),
        Row("steps", "loop", 12.0, goal=10.0, unit="M/s", at_least=True, baseline_measured=0.5),
        Row("quick" if quick else "full", "nothing", 2.0, unit="ns/parameter", parameters=1_000, baseline_measured=3.0),
    ]
"""
"""A benchmark whose figures are known: one goal is missed, two are met, and one row has none."""


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    path = tmp_path / "bench_made_up.py"
    path.write_text(MADE_UP)
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def line_of(text: str, start: str) -> list[str]:
    """Returns the cells of the printed row that starts so."""
    (found,) = (line.split() for line in text.splitlines() if line.strip().startswith(start))
    return found


def test_a_real_benchmark_prints_its_rows() -> None:
    done = run("--quick", FOLDER / "bench_replay.py")
    assert done.returncode == 0, done.stderr
    for size in ("1 ", "1,000", "10,000"):
        assert f"replay, policies: {size}" in done.stdout
    assert ">= 10" in done.stdout
    assert "Benchmarks (quick)" in done.stdout
    assert "numpy" in done.stdout.splitlines()[0]


def test_a_missed_goal_is_shown_as_missed_and_others_as_met(made_up: Path) -> None:
    done = run(made_up)
    assert done.returncode == 0, done.stderr
    assert line_of(done.stdout, "slow ") == "slow peer <= 0.70 0.750 0.75-1.12 1.000 3000.00 / 4000.00 MISSED".split()
    assert line_of(done.stdout, "fast ") == "fast peer <= 0.70 0.250 0.25-0.38 0.300 1000.00 / 4000.00 met".split()
    assert line_of(done.stdout, "steps ") == "steps (M/s) loop: 0.5 >= 10 12 met".split()
    assert line_of(done.stdout, "full ") == "full (ns/parameter) nothing: 3 2".split()
    assert "Goals: 3, met: 2, missed: 1; rows: 4" in done.stdout


def test_a_missed_goal_fails_a_strict_run(made_up: Path) -> None:
    assert run("--strict", made_up).returncode == 1


def test_a_strict_run_without_a_miss_ends_well(made_up: Path) -> None:
    made_up.write_text(MADE_UP.replace("[3.0, 3.0, 6.0]", "[2.0, 2.0, 6.0]"))
    assert run("--strict", made_up).returncode == 0


def test_json_holds_every_row_with_its_verdict_and_the_machine(made_up: Path, tmp_path: Path) -> None:
    record = tmp_path / "results.json"
    done = run("--quick", made_up, "--json", record)
    assert done.returncode == 0, done.stderr
    results = json.loads(record.read_text())
    assert (results["quick"], results["busy"]) == (True, False)
    assert {"processor", "cores", "threads", "python", "torch", "numpy", "gradscale"} <= results["machine"].keys()
    assert [(row["benchmark"], row["met"]) for row in results["rows"]] == [
        ("slow", False),
        ("fast", True),
        ("steps", True),
        ("quick", None),
    ]
    assert results["rows"][0] == {
        "file": "bench_made_up",
        "benchmark": "slow",
        "baseline": "peer",
        "measured": 0.75,
        "goal": 0.7,
        "unit": "times",
        "at_least": False,
        "quartiles": [0.75, 1.125],
        "mean": 1.0,
        "seconds": [3.0, 4.0],
        "rounds": 3,
        "baseline_measured": None,
        "parameters": None,
        "met": False,
    }


def test_the_table_goes_between_the_marks_of_its_kind_and_nothing_else_changes(made_up: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- figures: quiet -->\nold\n<!-- end: quiet -->\n<!-- figures: busy -->\nkept\n<!-- end: busy -->\n"
    )
    for _ in range(2):
        done = run(made_up, "--markdown", page)
        assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- figures: quiet -->\n\n| benchmark | baseline | goal |")
    assert text.count("| slow | peer | <= 0.70 | 0.750 |") == 1
    assert "old" not in text
    assert text.endswith("<!-- end: quiet -->\n<!-- figures: busy -->\nkept\n<!-- end: busy -->\n")


def test_a_page_without_marks_is_refused_before_anything_is_measured(made_up: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    done = run(made_up, "--markdown", page)
    assert done.returncode == 1
    assert "must hold the lines <!-- figures: quiet --> and <!-- end: quiet -->, in order and once" in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "bench_missing.py")
    assert done.returncode == 1
    assert "A benchmark must be a Python file with a function `rows`." in done.stderr


def test_plots_are_drawn(made_up: Path, tmp_path: Path) -> None:
    bars, growth = tmp_path / "bars.png", tmp_path / "growth.png"
    done = run(made_up, "--plot", bars, "--growth", growth)
    assert done.returncode == 0, done.stderr
    assert {path.read_bytes()[:8] for path in (bars, growth)} == {b"\x89PNG\r\n\x1a\n"}


def test_every_row_of_the_bars_was_measured_in_the_published_run() -> None:
    published = json.loads((ROOT / "benchmarks" / "results.json").read_text())["rows"]
    assert BARS.keys() <= {(row["benchmark"], row["baseline"]) for row in published if row["quartiles"]}


def test_the_process_that_keeps_a_core_busy_ends_with_the_block_even_by_an_error() -> None:
    spinners: list[subprocess.Popen[bytes]] = []

    def fail_while_busy() -> None:
        with one_core_busy() as spinner:
            spinners.append(spinner)
            assert spinner.poll() is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_while_busy()
    assert spinners[0].poll() is not None


def test_a_busy_run_says_so(made_up: Path) -> None:
    done = run("--busy", made_up)
    assert done.returncode == 0, done.stderr
    assert "Benchmarks (busy)" in done.stdout
