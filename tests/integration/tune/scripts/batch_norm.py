"""A small convolution with a batch normalization, most of whose time is the normalization's."""

import keras
import numpy as np

images = np.random.default_rng(0).normal(size=(2048, 32, 32, 3)).astype("float32")
labels = np.zeros(2048, "int32")
model = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        keras.layers.Conv2D(8, 3, name="conv_a"),
        keras.layers.BatchNormalization(name="norm_a"),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(images, labels, epochs=8, batch_size=64, verbose=0)
