"""The order of a training run: epochs, validation, checkpoints, health checks."""
