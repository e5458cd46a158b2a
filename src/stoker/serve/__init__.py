"""Answers requests over REST and gRPC. Both only convert messages; the dataplane, which knows neither, answers."""
