"""Runs a training: epochs of steps, validation, checkpoints and health checks, in order."""
