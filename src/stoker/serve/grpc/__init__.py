"""The gRPC services, as TensorFlow Serving defines them: convert messages to and from the dataplane's."""
