"""Gives the tests eight devices on a CPU: JAX reads this once, before the first computation of the process."""

import os

FLAG = "--xla_force_host_platform_device_count=8"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
