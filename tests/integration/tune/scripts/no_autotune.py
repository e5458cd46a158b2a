# mypy: ignore-errors
"""A loop over a dataset that calls Python for each element, with TensorFlow's help turned off."""

import numpy as np
import tensorflow as tf

options = tf.data.Options()
options.autotune.enabled = False


def load(number):
    seed = number.numpy()
    return np.sort(np.random.default_rng(seed).random(60_000)).astype("float32")[:64]


def load_one(number):
    row = tf.py_function(load, [number], tf.float32)
    return tf.ensure_shape(row, [64])


dataset = tf.data.Dataset.range(400)
dataset = dataset.map(load_one)
dataset = dataset.batch(8).with_options(options)
weights = tf.Variable(tf.zeros((64, 1)))


@tf.function
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights - 1.0))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


for batch in dataset:
    train_step(batch)
print("steps done")
