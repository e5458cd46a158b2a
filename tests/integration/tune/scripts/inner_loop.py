# mypy: ignore-errors
"""Epochs that are one tf.function each, over a dataset that is shuffled again in each of them."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
random = np.random.default_rng(5)
x = random.random((1_500, 32), dtype="float32")
y = random.integers(0, 2, (1_500, 1)).astype("float32")


def noisy(features, label):
    return features + 0.01 * tf.random.normal((32,)), label


dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(500).map(noisy).batch(16)
model = keras.Sequential(
    [
        keras.Input((32,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam()
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
mean = keras.metrics.Mean()


def one_step(features, label):
    with tf.GradientTape() as tape:
        loss = loss_fn(label, model(features, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905 - as tutorials have it
    mean.update_state(loss)


@tf.function
def train_epoch(batches):
    for features, label in batches:
        one_step(features, label)


@tf.function
def train_captured():
    for features, label in dataset:
        one_step(features, label)


@tf.function
def train_by_iterator(iterator):
    for _ in tf.range(10):
        features, label = next(iterator)
        one_step(features, label)


for _ in range(6):
    train_epoch(dataset)
print("mean of the losses", mean.result().numpy().tobytes().hex())
if "--all" in sys.argv:
    for _ in range(3):
        train_captured()
    iterator = iter(dataset.repeat())
    for _ in range(8):
        train_by_iterator(iterator)
for weight in model.variables:
    if weight.dtype == "float32":
        print(weight.path, weight.numpy().tobytes().hex()[:64])
print("steps", int(optimizer.iterations.numpy()))
