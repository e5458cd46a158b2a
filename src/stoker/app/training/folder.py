"""File names in the folder of the stage `train`."""

from __future__ import annotations

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""

RESOLVED = "resolved.json"
"""The resolved settings: the value of every `auto`."""

METRICS = "metrics.jsonl"
"""The metrics of each call of steps, and of each epoch."""

WALL_TIME = "wall_time.json"
"""The account of the run's wall time, over all its processes."""

TENSORBOARD = "tensorboard"
"""Folder of the metrics as TensorBoard event files."""
