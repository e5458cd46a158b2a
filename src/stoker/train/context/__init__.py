"""The state of a training run outside its step: position, preemption, monitor, utilization."""
