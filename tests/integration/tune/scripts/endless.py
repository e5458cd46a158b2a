# mypy: ignore-errors
"""Trains without end, and says when it has begun."""

import tensorflow as tf

weights = tf.Variable(0.0)


@tf.function
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.square(weights - x)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


for number, x in enumerate(tf.data.Dataset.from_tensors(1.0).repeat()):
    train_step(x)
    if number == 50:
        print("under way", flush=True)
