# mypy: ignore-errors
"""Trains, says something on both streams, and fails."""

import sys

import keras
import numpy as np

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(np.ones((64, 2)), np.ones((64, 1)), verbose=0)
print("on stdout")
print("on stderr", file=sys.stderr)
raise RuntimeError("as it was written")
