"""The one style of all reports, light and dark, from 360 pixels of width on."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

PICTURE_STYLE = (_FOLDER / "pictures.css").read_text(encoding="utf-8")
"""Of a picture that is a file of its own."""

PAGE_STYLE = PICTURE_STYLE + (_FOLDER / "page.css").read_text(encoding="utf-8")
"""Of a page."""
