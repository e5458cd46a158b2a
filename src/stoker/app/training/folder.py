"""What lies in the folder of the stage `train`."""

from __future__ import annotations

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""

RESOLVED = "resolved.json"
"""What every `auto` became."""

METRICS = "metrics.jsonl"
"""The metrics of each call of steps, and of each epoch."""

WALL_TIME = "wall_time.json"
"""Where the run's wall time went, over all its processes."""

TENSORBOARD = "tensorboard"
"""Folder of the same as TensorBoard's events."""
