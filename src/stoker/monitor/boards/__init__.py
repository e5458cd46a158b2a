"""Generates the dashboards in `monitor/dashboards`; needs the extra `grafana`, which users of the dashboards do not need.

`python -m stoker.monitor.boards.make` writes them.
"""
