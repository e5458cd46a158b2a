"""What the server does, without a protocol; REST and gRPC convert requests for it."""
