"""Runs Prometheus and Alertmanager on this machine: settings, start, state and end."""
