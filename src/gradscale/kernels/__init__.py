"""Kernels of a framework that several adapters share. Only adapters import this package."""
