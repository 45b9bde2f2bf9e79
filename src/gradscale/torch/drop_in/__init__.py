"""`GradScaler`, a drop-in for torch's own."""
