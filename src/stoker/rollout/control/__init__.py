"""Moves a rollout on: the controller, its lease, and whom it tells."""
