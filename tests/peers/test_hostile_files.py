"""Files made to exhaust memory, time or the stack are refused, by a process that has little of each."""

import json
import sys

import pytest
from tests.peers.hostile_files import FILES
from tests.peers.limits import run_in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")

NAMES = {f"{'keras' if 'mapping' in name else 'fairseq'}-{index}": name for index, name in enumerate(FILES)}
"""Names of the files. Keras's reader looks for mappings inside mappings."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What came of each file, by its description; those after one that ended the process are missing."""
    folder = tmp_path_factory.mktemp("hostile")
    for file, name in NAMES.items():
        (folder / file).write_bytes(FILES[name]())
    ended = run_in_child("tests.peers.read_files", str(folder))
    read = {NAMES[file]: outcome for file, *outcome in map(json.loads, ended.stdout.splitlines())}
    print(ended.stderr[-3000:], f"ended with {ended.returncode}", sep="\n")
    return read


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_little_memory_and_time(outcomes: dict[str, list[str]], name: str) -> None:
    kind, message = outcomes[name]
    assert kind == "ValueError"
    assert "Received" in message
    assert len(message) < 2000
