"""This machine: its devices, limits and processes. Does not import TensorFlow."""
