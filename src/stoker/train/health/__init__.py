"""Checks of a training run: bad numbers, divergence, and unnoticed loss of speed."""
