# mypy: ignore-errors
"""A module of a package, with arguments, run by `python -m`; it fits what is unusual."""

import argparse
import tempfile

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
epochs = parser.parse_args().epochs
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)


def shown(*values):
    print(*(float(f"{float(value):.6g}") for value in values))


# Several inputs and outputs by name, a split, weights.
a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
joined = keras.layers.Dropout(0.2)(keras.layers.Concatenate()([a, b]))
model = keras.Model(
    {"a": a, "b": b},
    {"o": keras.layers.Dense(1, name="o")(joined), "p": keras.layers.Dense(3, name="p")(a)},
)
model.compile("adam", {"o": "mse", "p": "mse"}, metrics={"o": ["mae"]})
history = model.fit(
    {"a": random.random((640, 4)), "b": random.random((640, 2))},
    {"o": random.random((640, 1)), "p": random.random((640, 3))},
    sample_weight=np.ones(640),
    validation_split=0.2,
    epochs=epochs,
    batch_size=8,
    verbose=0,
)
shown(*history.history["loss"], *history.history["val_loss"])


# Keras looks closely at its own classes when it saves, loads and clones.
with tempfile.TemporaryDirectory() as folder:
    model.save(f"{folder}/model.keras")
    loaded = keras.models.load_model(f"{folder}/model.keras")
    print(loaded.compiled, keras.models.clone_model(model).count_params())
    tf.saved_model.save(tf.Module(), folder)


# A generator, a class weight, several steps a call, and a callback that is not in a list.
def batches():
    # Its own numbers: how far ahead of the training they are drawn depends on the machine.
    own = np.random.default_rng(1)
    while True:
        yield own.random((8, 4)).astype("float32"), own.integers(0, 3, 8)


model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=4)
model.fit(batches(), steps_per_epoch=40, epochs=epochs, verbose=0)
model.fit(
    random.random((800, 4)),
    random.integers(0, 3, 800),
    class_weight={0: 1.0, 1: 2.0, 2: 1.0},
    callbacks=keras.callbacks.EarlyStopping("loss"),
    batch_size=8,
    verbose=0,
)
shown(*model.layers[0].kernel.numpy().ravel())


class Own(keras.Model):
    """A step of its own, that prints when it is traced."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        print("traced")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) + tf.random.normal(()) * 0.0 - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


model = Own()
model.compile("sgd")
history = model.fit(random.random((640, 4)), random.random((640, 1)), batch_size=8, verbose=0)
shown(*model.dense.kernel.numpy().ravel())

# Ragged batches, an iterator by hand, a dataset in a tf.function.
ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [2.0, 3.0]] * 8))
print(sum(int(batch.shape[0]) for batch in ragged.ragged_batch(3)))
dataset = tf.data.Dataset.from_tensor_slices(np.ones((64, 4), "float32")).batch(8)
iterator = iter(dataset)
print(next(iterator).shape, iterator.get_next().shape, len(list(dataset.as_numpy_iterator())))
weights = tf.Variable(tf.zeros((4, 1)))


@tf.function
def whole_pass(batches):
    count = 0
    for x in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - 1.0))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        count += 1
    return count


print([int(whole_pass(dataset)) for _ in range(8)])
shown(*weights.numpy().ravel())


# A strategy with all its parts.
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()


@tf.function
def train_step(x):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)


for _ in range(2):
    for x in strategy.experimental_distribute_dataset(dataset):
        loss = train_step(x)
shown(loss)
try:
    model.fit(np.ones((8, 4)), np.ones((7, 1)))
except ValueError:
    print("refused as ever")
