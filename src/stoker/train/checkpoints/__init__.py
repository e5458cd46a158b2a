"""Checkpoints that are complete or absent, retained by rules, and found again after any kill.

config     how often they are written, and which are kept
identity   what must be unchanged to resume a run: configuration, code, data, versions
tensors    named arrays <-> one file
store      one checkpoint: published by a manifest, verified; the newest good one, the best one
retention  which of them are deleted
cadence    when the next one is due, by the cost of the last ones
writer     the background thread that connects these modules

Only `train/checkpoints/state.py` uses TensorFlow: it converts a model to named arrays and back.
"""
