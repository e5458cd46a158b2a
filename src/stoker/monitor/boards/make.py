"""Writes the dashboards as JSON: `python -m stoker.monitor.boards.make`."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from stoker.core.files import write_atomic
from stoker.monitor.boards.boards import BOARDS
from stoker.monitor.boards.parts import Board, built
from stoker.monitor.dashboards import FOLDER


def text_of(board: Board) -> str:
    """Return a board as Grafana's JSON; the same board gives the same text."""
    return JSONEncoder(indent=1, sort_keys=True).encode(built(board).build()) + "\n"


def main() -> None:
    """Write each board."""
    for board in BOARDS:
        write_atomic(FOLDER / f"{board.uid}.json", text_of(board))


if __name__ == "__main__":
    main()
