"""Manifests for a cluster, written to be read: one model in an image, and the objects that run it."""
