"""What a run shows: a verdict, pictures, and what other policies would have done."""
