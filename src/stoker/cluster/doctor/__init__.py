"""The machine as a training run uses it: its resources, and its problems."""
