"""Rollouts: operations, A/B tests, and the split of the traffic for other gateways."""
