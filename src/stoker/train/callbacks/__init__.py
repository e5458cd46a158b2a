"""Keras callbacks: their hooks, errors and state."""
