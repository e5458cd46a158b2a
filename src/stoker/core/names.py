"""Names for hosts and URLs."""

from __future__ import annotations

import re
import unicodedata

_LONGEST_NAME = 63
"""Characters of a DNS label. Source: RFC 1123."""


def dns_name(*candidates: str) -> str:
    """Return the first candidate that leaves a DNS label (a-z, 0-9 and inner dashes), or `model`."""
    for candidate in candidates:
        plain = (
            unicodedata.normalize("NFKD", candidate.casefold()).encode("ascii", "ignore").decode()
        )
        name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
        if name and not name[0].isalpha():
            name = f"model-{name}"
        if name:
            return name[:_LONGEST_NAME].rstrip("-")
    return "model"
