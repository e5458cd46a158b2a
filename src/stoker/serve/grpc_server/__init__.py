"""A gRPC server on an HTTP/2 implementation of its own: one event loop, and threads for handlers."""
