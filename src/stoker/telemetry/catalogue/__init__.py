"""The definitions of all metrics of training, serving, rollout, GPUs and hosts: each once, with one file per writer.

Code writes only metrics from this catalogue. `docs/reference/metrics.md`, dashboards and alerts are generated from it.
"""
