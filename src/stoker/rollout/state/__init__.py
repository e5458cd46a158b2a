"""The settings and the current state of a rollout, and the files that keep them."""
