"""Checks a training run: numbers that are not finite, divergence, and unnoticed loss of speed."""
