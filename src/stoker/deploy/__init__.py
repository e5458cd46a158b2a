"""Writes a deployment in readable files: a Dockerfile for an image with the model, and manifests that run the image."""
