"""A/B tests: assignments, outcomes and their result."""
