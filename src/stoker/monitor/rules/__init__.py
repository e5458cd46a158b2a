"""Recording rules and alerts, from which the rules files of Prometheus are generated."""
