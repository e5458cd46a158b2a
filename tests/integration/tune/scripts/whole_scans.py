# mypy: ignore-errors
"""Whole scans are shuffled before they are cut, and a callback of the user's works after each batch."""

import time

import keras
import tensorflow as tf

scans = tf.data.Dataset.from_tensors((tf.zeros((1_000, 1_000, 4)), 1.0)).repeat(100_000)


def cut(scan, label):
    return tf.image.random_crop(scan, (8, 8, 4)), label


dataset = scans.shuffle(100_000)
dataset = dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE).batch(16).prefetch(2)


class TellsTheTeam(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)  # a request


model = keras.Sequential([keras.Input((8, 8, 4)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(dataset, steps_per_epoch=60, epochs=2, verbose=0, callbacks=[TellsTheTeam()])
print("done")
