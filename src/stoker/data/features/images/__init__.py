"""Encoded images inside the graph: decoded and upright, so that the exported model takes bytes."""
