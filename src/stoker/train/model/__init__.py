"""What a training step needs to know about a Keras model and its layers."""
