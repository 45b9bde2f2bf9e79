"""Loss scaling inside the trainers people use: one module each, imported by name."""
