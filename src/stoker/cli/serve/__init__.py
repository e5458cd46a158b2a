"""`stoker serve`: its flags, including TensorFlow Serving's, and the configuration that they set."""
