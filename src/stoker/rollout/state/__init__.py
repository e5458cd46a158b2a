"""What a rollout is told, where it stands, and the files that keep it."""
