"""Requests as OpenTelemetry spans."""
