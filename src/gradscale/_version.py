"""The version, kept here alone: the build and `gradscale.__version__` both read it."""

__version__ = "0.1.0.dev0"
