"""What the server does, without a protocol: REST and gRPC convert to and from it."""
