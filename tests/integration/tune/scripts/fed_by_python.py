# mypy: ignore-errors
"""Python makes every batch: a PyDataset for `fit`, and a loop that calls `train_on_batch`."""

import math
import time

import keras
import numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
x = random.random((640, 64), dtype="float32")


class Pictures(keras.utils.PyDataset):
    def __len__(self):
        return math.ceil(len(x) / 16)

    def __getitem__(self, number):
        batch = x[number * 16 : (number + 1) * 16]
        time.sleep(0.02)  # a share answers
        return batch, batch


class Autoencoder(keras.Model):
    """As Keras's guides write it: a train_step of its own, and no call."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(64)])
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        given, wanted = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(given) - wanted) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


model = Autoencoder()
model.compile(optimizer="adam")
model.fit(Pictures(), epochs=2, verbose=2)

net = keras.Sequential([keras.layers.Dense(1)])
net.compile(optimizer="sgd", loss="mse")
for _ in range(120):
    net.train_on_batch(x[:16], x[:16, :1])
print("done")
