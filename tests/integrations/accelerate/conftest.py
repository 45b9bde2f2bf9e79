"""These tests need Accelerate."""

from importlib.util import find_spec

from tests.integrations.accelerate.state import (
    _fresh_state,  # noqa: F401
    _one_thread_and_the_same_random_numbers,  # noqa: F401
)

collect_ignore_glob = [] if find_spec("accelerate") else ["*.py"]
