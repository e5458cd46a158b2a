"""What a step must know of a Keras model and its layers."""
