"""A training step, and calls of many steps: traced, compiled, in different forms."""
