"""The rule on a device: one kernel per step, and no host read."""
