"""`gradscale replay`: what it reads, how policies are named, what it prints, and its errors."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gradscale import Dynamic
from gradscale.cli import app
from gradscale.cli._sequences import read_sequences
from gradscale.peers import PEERS


def invoke(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["replay", *arguments], input=stdin, env={"COLUMNS": "80"})


def replayed(*arguments: str, stdin: str | bytes = "") -> Any:
    shown = invoke(*arguments, "--json", stdin=stdin)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def scales(*arguments: str, stdin: str | bytes = "") -> list[float]:
    return replayed(*arguments, stdin=stdin)["policies"][0]["scales"]


GROWING = "dynamic:init_scale=8,growth_interval=1"


@pytest.mark.parametrize(
    "flags",
    [
        "0 0 1",
        "0,0,1\n",
        "0\n0\n1\n",
        " 0, 0,\n 1,\n",
        "false False true",
        "[0, 0, 1]",
        "[false, false, true]",
        '{"found_inf": [0, 0, 1]}',
        b"\xef\xbb\xbf0 0 1",
    ],
)
def test_flags_are_read_in_every_form(flags: str | bytes) -> None:
    assert scales("-p", GROWING, stdin=flags) == [16, 32, 16]


def test_flags_come_from_a_file_or_from_a_dash(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    path.write_text("0 1")
    assert scales(str(path), "-p", GROWING) == [16, 8]
    assert scales("-", "-p", GROWING, stdin="0 1") == [16, 8]


@pytest.mark.parametrize("amax", ["1 100", "1, 1e2", "[1, 100]"])
def test_amax_alone_decides_by_the_scale_what_overflows(tmp_path: Path, amax: str) -> None:
    path = tmp_path / "amax.txt"
    path.write_text(amax)
    run = replayed("--amax", str(path), "-p", "static:1024", "-p", "static:512")
    assert [policy["skipped"] for policy in run["policies"]] == [[0, 1], [0, 0]]


def test_amax_may_come_from_standard_input_and_hold_what_json_cannot() -> None:
    assert replayed("--amax", "-", "-p", "static:1", stdin='[1, "inf", "nan"]')["policies"][0]["skipped"] == [0, 1, 1]
    assert replayed("--amax", "-", "-p", "static:1", stdin="1 inf nan")["policies"][0]["skipped"] == [0, 1, 1]


def test_one_json_object_may_hold_every_sequence() -> None:
    steps = {"found_inf": [1, 1], "amax": [1, 1], "loss_finite": [0, 1], "upper_share": [0, 0.5]}
    run = replayed("-p", GROWING, "-p", "headroom", "-p", "histogram", stdin=json.dumps(steps))
    assert [policy["skipped"] for policy in run["policies"]] == [[1, 1]] * 3
    assert run["policies"][0]["scales"] == [8, 4]


def test_the_format_decides_where_amax_overflows() -> None:
    assert replayed("--amax", "-", "-p", "none", "-p", "static:1", stdin="1e5")["policies"][1]["skipped"] == [1]
    fits = replayed("--amax", "-", "--format", "bf16", "-p", "static:1", stdin="1e5")
    assert fits["policies"][0]["skipped"] == [0]


def test_json_holds_the_whole_run() -> None:
    run = replayed("-p", "dynamic:init_scale=2", stdin="0 1 1")
    assert run == {
        "steps": 3,
        "policies": [
            {
                "policy": "dynamic:init_scale=2",
                "settings": Dynamic(init_scale=2).to_dict(),
                "summary": {
                    "steps": 3,
                    "skipped": 2,
                    "final_scale": 1.0,
                    "lowest_scale": 1.0,
                    "highest_scale": 2.0,
                    "steps_at_floor": 2,
                    "steps_at_ceiling": 0,
                    "first_stuck_step": 2,
                },
                "scales": [2.0, 1.0, 1.0],
                "skipped": [0, 1, 1],
                "stuck": [0, 0, 1],
            }
        ],
    }


def test_a_scale_that_a_peer_lets_grow_to_infinity_is_still_json() -> None:
    run = replayed("-p", "keras:initial_scale=2**126,dynamic_growth_steps=1", stdin="0 0 0")["policies"][0]
    assert run["scales"] == [2.0**127, "inf", "inf"]
    assert run["summary"]["final_scale"] == "inf"


def test_steps_whose_gradients_are_all_zero_are_still_json() -> None:
    trace = json.dumps({"amax": [1.0, 0.0, 2.0]})
    assert len(scales("-p", "openseq2seq/LogMaxScaler", stdin=trace)) == 3


POLICIES = [
    *(system for system in PEERS if system not in ("jmp", "mindspore")),  # whose first rules need arguments
    "jmp:loss_scale=2**15",
    "mindspore/DynamicLossScaleManager",
    "openseq2seq/LogMaxScaler",
    "openseq2seq/LogMaxScaler:log_max=62,beta1=0,beta2=0",
    "dynamic",
    "headroom",
    "logmax",
    "histogram",
    "static:8",
    "none",
]
SIZES = st.sampled_from([0.0, 5e-324, 1e-45, 1e-30, 1.0, 6e4, 1e30, 3.4e38, 1e300, math.inf, math.nan])
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.booleans(), st.floats(0, 1)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(steps=STEPS, times=st.sampled_from([1, 40]), flags=st.booleans())
def test_any_trace_is_json_and_no_scale_is_nan(steps: list[Any], times: int, flags: bool) -> None:
    found_inf, amax, loss_finite, upper_share = (list(column) * times for column in zip(*steps, strict=True))
    trace = {"amax": amax, "loss_finite": loss_finite, "upper_share": upper_share}
    known = trace | {"found_inf": found_inf} if flags else trace
    run = replayed(*(word for spec in POLICIES for word in ("-p", spec)), stdin=json.dumps(known))
    for policy in run["policies"]:
        assert len(policy["scales"]) == len(amax)
        assert "nan" not in policy["scales"], policy["policy"]


def test_the_table_has_a_row_for_each_policy() -> None:
    shown = invoke("-p", "dynamic:init_scale=2", "-p", "static:1024", "-p", "torch", stdin="0 1 1")
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.output.splitlines()]
    assert ["3", "steps"] in rows
    assert ["static:", "1024", "2", "1024", "1024", "1024", "0", "0", "1"] in rows
    assert ["torch", "2", "16384", "16384", "65536", "0", "0"] in rows


def test_a_single_step_is_not_written_as_several() -> None:
    assert invoke(stdin="0").stdout.startswith("1 step\n")


def test_markup_in_a_policy_is_shown_as_it_is() -> None:
    assert "[red]" in invoke("-p", "torch:device=[red]", stdin="0").stdout
    assert "[red]" in invoke("-p", "static:[red]", stdin="0").stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        ([], "", "standard input is empty"),
        ([], " \n", "standard input is empty"),
        ([], "0 1 2", "standard input must hold 0 or 1 for each step, .* Received: '2' at step 2"),
        (
            [],
            "0.5 2e3",
            r"Received: '0.5' at step 0\. To replay the largest gradient .* --amax FILE\.",
        ),
        (
            [],
            "[0.5, 2e3]",
            r"Received: 0.5 at step 0\. To replay the largest gradient .* --amax FILE\.",
        ),
        ([], "0 x", r"Received: 'x' at step 1\.$"),
        ([], "0101", "Received: '0101' at step 0"),
        ([], b"\xff\xfe0\x001\x00", "standard input must be UTF-8 text: invalid start byte at byte 0"),
        ([], "[0, 1", "standard input is not valid JSON"),
        ([], "[" * 100_000, "standard input is not valid JSON"),
        ([], "[[], []]" * 50_000, "standard input is not valid JSON for a replay: one list, or one object"),
        (
            [],
            f'{{"{"k" * 9999}": [0]}}',
            r"has some of the keys .* Received: \['k{30,40}\.\.\.k{30,40}'\]",
        ),
        ([], "[" + '"0",' * 9999 + f'"{"x" * 9999}"]', "standard input must hold numbers. Received: 'x{40}'"),
        ([], "{}", r"has some of the keys found_inf, amax, .* Received: \[\]"),
        ([], '{"flags": [0]}', r"has some of the keys found_inf, amax, .* Received: \['flags'\]"),
        ([], '{"amax": 1}', "standard input: amax must be a JSON list"),
        ([], '{"amax": ["x"]}', "standard input: amax must hold numbers. Received: 'x'"),
        ([], "[]", "There must be at least one step"),
        ([], "[0, 2]", "`found_inf` must hold flags.* Received: 2 at step 1"),
        ([], "[null]", "`found_inf` must be a flat sequence of numbers"),
        ([], '{"found_inf": [0], "amax": [1, 2]}', "Every sequence must have one value for each step"),
        (["--amax", "-"], "1 x", "standard input must hold numbers. Received: 'x'"),
        (["--amax", "-"], "1 -1", "`--amax` must not be negative"),
        ([], '{"amax": [-1]}', "`amax` must not be negative"),
        ([""], "0", "Error: FILE must name a file, or be - for standard input. Received: ''"),
        (["--amax", ""], "0", "Error: `--amax` must name a file, or be - for standard input. Received: ''"),
        (["-", "--amax", "-"], "0", "Only one of the flags and --amax can come from standard input"),
        (["--format", "float77"], "0", "`--format`: There is no format of that name. Received: 'float77'"),
        (
            ["-p", "headroom"],
            "0",
            r"reads `amax`\. .* Give it by --amax FILE, or as `amax` in a JSON object\.",
        ),
        (["-p", "histogram"], "0", r"reads `upper_share`\. .* Give it as `upper_share` in a JSON object\."),
        (["-p", "nope"], "0", "`--policy` 'nope'"),
        (["{folder}"], "", "Is a directory"),
        (["{folder}/nothing"], "", "nothing: No such file or directory"),
        (["--amax", "{folder}/nothing"], "", "nothing: No such file or directory"),
    ],
)
def test_mistakes_are_reported_in_one_line_and_exit_with_2(
    tmp_path: Path, arguments: list[str], stdin: str | bytes, text: str
) -> None:
    shown = invoke(*(argument.format(folder=tmp_path) for argument in arguments), stdin=stdin)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert len(shown.stderr.splitlines()) == 1
    assert shown.stderr.startswith("Error: ")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(shown.stderr)


def test_a_file_without_end_is_refused() -> None:
    shown = invoke("/dev/zero")
    assert shown.exit_code == 2
    assert "/dev/zero must not be larger than 33554432 bytes" in shown.stderr


def test_amax_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"amax": [1]}')
    shown = invoke(str(path), "--amax", str(path))
    assert shown.exit_code == 2
    assert "`amax` is given twice: by --amax and in" in shown.stderr


def test_a_terminal_with_nothing_piped_in_is_shown_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ValueError, match=r"There is nothing to replay\. Name a file"):
        read_sequences(None, None)
