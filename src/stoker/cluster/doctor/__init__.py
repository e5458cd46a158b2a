"""Examines a machine for training: its resources, and problems that a training run would have."""
