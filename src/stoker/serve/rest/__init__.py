"""The REST interface with TensorFlow Serving's paths: converts requests and answers to and from the dataplane's."""
