# mypy: ignore-errors
"""XLA is requested, and run_eagerly remains from the last search for a bug."""

import keras
import numpy as np

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile(
    optimizer="sgd",
    loss="sparse_categorical_crossentropy",
    jit_compile=True,
    run_eagerly=True,
)
random = np.random.default_rng(0)
model.fit(random.random((512, 16)), random.integers(0, 4, 512), epochs=2, verbose=0)
print("eager", model.run_eagerly)
