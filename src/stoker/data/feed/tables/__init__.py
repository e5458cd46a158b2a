"""Shuffled batches of tables that may be larger than memory."""
