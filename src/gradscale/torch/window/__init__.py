"""What happens between two steps: losses, backward passes, and gradients that accumulate."""
