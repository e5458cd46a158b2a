"""The controller, which advances a rollout: its lease, decisions, webhooks and notifications."""
