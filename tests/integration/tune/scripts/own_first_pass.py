# mypy: ignore-errors
"""Loops of the user's own over cached data: one fills the cache, one reads what the first has filled."""

import numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
x = random.random((120, 64), np.float32)
y = random.random((120, 1), np.float32)


def slow(features, label):
    big = tf.tile(features, [12_000])
    return features + 0 * tf.reduce_sum(tf.sort(big)), label


def scale(features, label):
    return features * 0.5, label


dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.map(scale)
dataset = dataset.map(slow)
dataset = dataset.cache()
dataset = dataset.shuffle(16).batch(4).prefetch(2)
weights = tf.Variable(tf.zeros((64, 1)))


@tf.function
def train_step(features, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.linalg.matmul(features, weights) - labels))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


@tf.function
def long_trace(features, labels):
    with tf.GradientTape() as tape:
        hidden = features
        for _ in range(600):
            hidden = tf.tanh(hidden + 0.01)
        loss = tf.reduce_mean(tf.square(tf.linalg.matmul(hidden, weights) - labels))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


for _ in range(3):
    for batch in dataset:
        train_step(*batch)
for _ in range(3):
    for again in dataset:
        long_trace(*again)
print("done")
