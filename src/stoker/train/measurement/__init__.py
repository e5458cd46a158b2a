"""Measures a training without training: windows, calls, and what a step consists of."""
