"""One training step, and many in one call: traced, compiled, in alternative forms."""
