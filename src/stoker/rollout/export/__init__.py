"""A rollout's split in the form of other programs: gateways, KServe, Argo Rollouts, Flagger, TensorFlow Serving."""
