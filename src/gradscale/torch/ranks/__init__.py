"""Many ranks: who holds which gradient, the one round of numbers that a step sends, and what is raised if ranks differ.

`gradscale.torch.step.agree`, stage two of a step, puts them together.
"""
