"""One training step, and many in one call: traced, compiled, and chosen between forms."""
