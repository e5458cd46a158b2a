# mypy: ignore-errors
"""A training loop without tf.function: every operation is called from Python."""

import keras
import numpy as np
import tensorflow as tf

random = np.random.default_rng(3)
dataset = tf.data.Dataset.from_tensor_slices(
    (random.random((2_000, 16), dtype="float32"), random.random((2_000, 1), dtype="float32"))
).batch(20)
model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905 - as tutorials have it


for x, y in dataset:
    train_step(x, y)
print("done")
