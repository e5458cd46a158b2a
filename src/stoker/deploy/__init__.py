"""Writes manifests that people can read: a model in an image, and the objects that run the image on a cluster."""
