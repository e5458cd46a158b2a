"""Compiling with XLA: what TensorFlow must be told so that the numbers stay the same."""
