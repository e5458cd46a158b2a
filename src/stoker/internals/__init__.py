"""The only modules that use private names of TensorFlow and Keras, one for each library."""
