"""Measures a training run: windows, calls, and the parts of a step."""
