"""Checkpoints. Each is complete or absent, even after a kill; old ones are deleted by rules.

identity   what must be unchanged to resume a run: configuration, code, data, versions
tensors    writes named arrays to a file, and reads them
store      writes, verifies and finds checkpoints: the newest good one, the best one
cadence    decides when the next checkpoint is due, from the cost of the last ones
writer     writes checkpoints in a background thread, and deletes old ones
state      converts a model's variables to named arrays and back
seeds      states of random number generators outside the model

Only `state` and `seeds` use TensorFlow.
"""
