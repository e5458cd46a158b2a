"""Answers requests. REST and gRPC code only converts messages; the dataplane, independent of both, answers them."""
