"""Recording rules and alerts, generated as rules of Prometheus."""
