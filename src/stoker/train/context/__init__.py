"""What a training run knows and is asked beside its step: position, requests to stop, utilization."""
