# mypy: ignore-errors
"""Mixed precision, with an output layer that stays in float16."""

import keras
import numpy as np

keras.mixed_precision.set_dtype_policy("mixed_float16")
model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
random = np.random.default_rng(0)
model.fit(random.random((512, 16)), random.integers(0, 4, 512), epochs=2, verbose=0)
print("policy", keras.mixed_precision.dtype_policy().name)
