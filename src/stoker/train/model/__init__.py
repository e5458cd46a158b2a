"""Facts about a Keras model and its layers that a training step needs; rematerialization."""
