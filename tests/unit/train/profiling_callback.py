"""A callback of a user's that starts TensorFlow's profiler itself."""

from __future__ import annotations

import keras
import tensorflow as tf


class Profiles(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Profiles the whole training."""

    def on_train_begin(self, logs: object = None) -> None:
        """Start."""
        del logs
        tf.profiler.experimental.start("/nowhere")
