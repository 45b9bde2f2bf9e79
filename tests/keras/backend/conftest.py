"""What the tests of a backend have in common."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    two_devices()
    # Keras 3.15 converts TensorFlow's variables in a way that numpy 2 frowns upon.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation doesn't accept:DeprecationWarning")


def two_devices() -> None:
    """Gives the tests two devices on a CPU: backends read this once, before their first computation."""
    if os.environ["KERAS_BACKEND"] == "jax":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
