"""REST with TensorFlow Serving's paths; only converts."""
