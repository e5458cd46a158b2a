"""`stoker serve`: its flags, which are those of TensorFlow Serving, and what they configure."""
