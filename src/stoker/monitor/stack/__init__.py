"""Prometheus and Alertmanager on this machine: their settings, start, state and end."""
