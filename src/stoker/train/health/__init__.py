"""Is this run well: numbers gone wrong, divergence, and speed that is lost silently."""
