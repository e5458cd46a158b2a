"""Rollout: how traffic is split between versions of a model, and when a new version is good enough."""
