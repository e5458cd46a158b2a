"""Monitoring of all runs and servers of a machine: exporter, dashboards, alerts, and Prometheus with Alertmanager."""
