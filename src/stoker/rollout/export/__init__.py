"""Exports a rollout's traffic split to other programs: gateways, KServe, Argo Rollouts, Flagger, TensorFlow Serving."""
