"""Compiling with XLA so that the numbers stay the same."""
