"""`GradScaler` and `ShardedGradScaler`, drop-ins for torch's own."""
