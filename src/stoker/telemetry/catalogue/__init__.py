"""All metrics of training, input, serving, rollout, jobs, GPUs and hosts, each defined once: one file per writer.

Code writes only metrics from this catalogue; `docs/reference/metrics.md`, dashboards and alerts are made from it.
"""
