"""Generates files that run the monitoring (Prometheus, Alertmanager, rules, dashboards) on Compose and Kubernetes."""
