"""Writes the dashboards as JSON into the package; needs the extra `grafana`: `python packaging/dashboards/make_dashboards.py`."""

from __future__ import annotations

import json

from dashboard_gpu import GPUS
from dashboard_parts import Dashboard, built
from dashboard_rollout import ROLLOUT
from dashboard_serving import SERVING
from dashboard_training import TRAINING
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from stoker.core.files import write_atomic
from stoker.monitor.dashboards import FOLDER

DASHBOARDS = (TRAINING, GPUS, SERVING, ROLLOUT)
"""All of them."""

_UNKNOWN = ("auto", "auto_count", "auto_min", "id")
"""Keys that the SDK adds to each variable, but that Grafana's current schema does not know."""


def text_of(described: Dashboard) -> str:
    """Return a dashboard as Grafana's JSON; the text depends only on what describes it."""
    found = json.loads(JSONEncoder().encode(built(described).build()))
    del found["style"]  # also unknown to the schema: the theme is the user's
    for variable in found["templating"]["list"]:
        for key in _UNKNOWN:
            variable.pop(key, None)
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write each dashboard."""
    for each in DASHBOARDS:
        write_atomic(FOLDER / f"{each.uid}.json", text_of(each))


if __name__ == "__main__":
    main()
