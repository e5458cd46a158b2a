"""Answers requests independently of the protocol; REST and gRPC convert requests and answers for it."""
