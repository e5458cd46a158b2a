# mypy: ignore-errors
"""Digits by a small convolutional net, as Keras's first tutorial does it."""

import keras
import numpy as np

keras.utils.set_random_seed(7)
random = np.random.default_rng(7)
x_train = random.random((10_240, 28, 28, 1), dtype="float32")
y_train = random.integers(0, 10, 10_240)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer="adam",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
history = model.fit(x_train, y_train, batch_size=128, epochs=2, verbose=0)
print(f"loss {history.history['loss'][-1]:.9f}")
