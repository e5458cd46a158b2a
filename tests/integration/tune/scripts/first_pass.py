# mypy: ignore-errors
"""A dear map fills a cache once; what is to be changed stands far from where it costs."""

import keras
import numpy as np
import tensorflow as tf

BATCH = 4
random = np.random.default_rng(0)
x = random.integers(0, 256, (100, 64))
x = x / 255.0
y = random.integers(0, 2, 100)


def slow(features, label):
    big = tf.tile(features, [12_000])
    return features + 0 * tf.reduce_sum(tf.sort(big)), label


dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.map(slow)
dataset = dataset.cache()
dataset = dataset.batch(BATCH)

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(dataset, epochs=3, verbose=2)

weights = tf.Variable(tf.zeros((64, 1), tf.float64))


def train_step(features):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.linalg.matmul(features, weights) - 1.0))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


for _ in range(3):
    for features, _ in dataset:
        train_step(features)
print("done")
