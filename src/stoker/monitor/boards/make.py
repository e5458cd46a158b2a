"""Writes the dashboards as JSON: `python -m stoker.monitor.boards.make`."""

from __future__ import annotations

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from stoker.core.files import write_atomic
from stoker.monitor.boards.boards import BOARDS
from stoker.monitor.boards.parts import Board, built
from stoker.monitor.dashboards import FOLDER

_UNKNOWN = ("auto", "auto_count", "auto_min", "id")
"""Keys that the SDK adds to each variable, but that Grafana's current schema does not know."""


def text_of(board: Board) -> str:
    """Return a board as Grafana's JSON; the text depends only on the board."""
    found = json.loads(JSONEncoder().encode(built(board).build()))
    del found["style"]  # also unknown to the schema: the theme is the user's
    for variable in found["templating"]["list"]:
        for key in _UNKNOWN:
            variable.pop(key, None)
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write each board."""
    for board in BOARDS:
        write_atomic(FOLDER / f"{board.uid}.json", text_of(board))


if __name__ == "__main__":
    main()
