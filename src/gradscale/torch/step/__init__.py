"""The five stages of a step in PyTorch."""
