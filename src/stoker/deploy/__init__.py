"""Manifests for a cluster, written to be read: one model in an image, and what runs it."""
