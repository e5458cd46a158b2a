"""Trains models: the loop, the step, checkpoints, health checks, and measurements of a run."""
