"""The module for Triton's interpreter runs in a process of its own, and has no doctests."""

collect_ignore = ["interpreted.py"]
