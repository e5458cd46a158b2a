"""Every metric of training, input, serving, rollout, jobs, GPUs and hosts, once: a file for each writer.

Code writes only metrics that stand here; `docs/reference/metrics.md`, dashboards and alerts are made from them.
"""
