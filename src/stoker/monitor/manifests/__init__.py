"""The same Prometheus, Alertmanager, rules and dashboards for Docker Compose and for Kubernetes."""
