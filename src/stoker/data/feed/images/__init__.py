"""Batches of images: decoded, cropped and augmented in one call per batch."""
