"""The controller of a rollout: its lease, its hooks and its notifications."""
