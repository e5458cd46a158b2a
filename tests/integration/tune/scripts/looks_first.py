# mypy: ignore-errors
"""Looks at a batch before training, then fits with a mapped dataset that is never cached."""

import keras
import numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
x = random.random((600, 64), dtype="float32")
y = random.integers(0, 2, 600)


def slow(features, label):
    big = tf.tile(features, [400])
    return features + 0 * tf.reduce_sum(tf.sort(big)), label


dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.map(slow, num_parallel_calls=tf.data.AUTOTUNE)
dataset = dataset.batch(20).prefetch(tf.data.AUTOTUNE)

for features, labels in dataset.take(2):
    print("a batch of", features.shape[0], "labels", int(tf.reduce_sum(tf.ones_like(labels))))

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(dataset, epochs=4, verbose=2)
