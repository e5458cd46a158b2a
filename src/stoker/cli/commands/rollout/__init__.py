"""`stoker rollout`: operations on rollouts, A/B tests, and export of the traffic split to gateways."""
