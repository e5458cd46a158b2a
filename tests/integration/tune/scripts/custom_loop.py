# mypy: ignore-errors
"""A training loop written from scratch, with a tf.function for the step."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
random = np.random.default_rng(3)
x_train = random.random((4_096, 64), dtype="float32")
y_train = random.integers(0, 10, 4_096)


def augment(x, y):
    noise = tf.random.normal((40, 64))
    return x + 0.01 * tf.reduce_mean(tf.sort(noise, axis=0), axis=0), y


train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
train_dataset = train_dataset.map(augment)
train_dataset = train_dataset.shuffle(256).batch(64)

model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(learning_rate=1e-3)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss_value = loss_fn(y, logits)
    gradients = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights))  # noqa: B905 - as tutorials have it
    return loss_value


for epoch in range(3):
    total = 0.0
    for step, (x_batch, y_batch) in enumerate(train_dataset):  # noqa: B007 - printed below
        loss_value = train_step(x_batch, y_batch)
        total += float(loss_value)
    print(f"epoch {epoch}: {step + 1} steps")
