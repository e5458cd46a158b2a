"""Sends OpenTelemetry spans of requests."""
