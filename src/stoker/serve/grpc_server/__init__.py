"""A gRPC server with its own implementation of HTTP/2: one event loop, and threads for handlers."""
