"""Rollouts: split the traffic between versions of a model, and judge whether a new version is good enough."""
