# mypy: ignore-errors
"""A tf.function that is given the step's number as a Python number."""

import numpy as np
import tensorflow as tf

weights = tf.Variable(tf.zeros((8, 1)))
random = np.random.default_rng(0)
dataset = tf.data.Dataset.from_tensor_slices(
    (random.random((640, 8), dtype="float32"), random.random((640, 1), dtype="float32"))
).batch(16)


@tf.function
def train_step(x, y, step):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights - y))
    rate = 0.1 / (1 + step)
    weights.assign_sub(rate * tape.gradient(loss, weights))
    return loss


for step, (x, y) in enumerate(dataset):
    train_step(x, y, step)
print("steps", step + 1)
