"""gRPC with TensorFlow Serving's services; only converts."""
