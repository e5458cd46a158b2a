"""Batches of images: decoded, cropped, augmented and handed over, one call a batch."""
