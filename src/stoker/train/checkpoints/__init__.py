"""Checkpoints that are whole or not there, kept by rule, and found again after any kill.

config     how often, and which are kept
identity   what a run must still be to go on: configuration, code, data, versions
tensors    named arrays <-> one file
store      one checkpoint: published by a manifest, verified, the newest good one, the best one
retention  which of them may go
cadence    when the next one is due, from what the last ones cost
writer     the background thread that holds these together

Nothing here knows TensorFlow: `train/checkpoints/state.py` turns a model into named arrays and back.
"""
