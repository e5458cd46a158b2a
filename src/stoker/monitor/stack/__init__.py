"""Prometheus and Alertmanager of this machine: their settings, start, state and end."""
