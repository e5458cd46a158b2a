# mypy: ignore-errors
"""A strategy of two replicas, and a model that was made outside of its scope."""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("replicas", strategy.num_replicas_in_sync)

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(np.ones((256, 8)), np.ones((256, 1)), epochs=2, verbose=0)
