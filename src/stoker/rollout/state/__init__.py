"""The settings and the state of a rollout, and the files that store them."""
