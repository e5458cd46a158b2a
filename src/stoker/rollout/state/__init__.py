"""The settings of a rollout, where it stands, and the files that keep it."""
