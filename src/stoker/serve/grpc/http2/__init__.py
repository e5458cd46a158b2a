"""gRPC's transport: HTTP/2 on a loop, as far as a server of gRPC needs it."""
