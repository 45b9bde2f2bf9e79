"""Gives the tests eight devices on a CPU, and threads for them: JAX reads this once, before the first computation."""

import os

FLAG = "--xla_force_host_platform_device_count=8"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

# Threads of XLA: by default as many as devices, where there are fewer cores. An all-reduce blocks the thread it runs
# on, and a device may be in two of them at once: then, now and then, no thread is left for the last device.
os.environ["NPROC"] = "32"
