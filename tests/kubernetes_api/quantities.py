"""Amounts of resources: `500m`, `2Gi`, `1e3`."""

from __future__ import annotations

import re

from tests.kubernetes_api.resources import Object

_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_FACTORS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_FORM = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")


def parse(text: object) -> float | None:
    """Return an amount; None if it is not one."""
    found = _FORM.fullmatch(str(text))
    if found is None or found[2] not in _FACTORS:
        return None
    return float(found[1]) * _FACTORS[found[2]]


def value(text: object) -> float:
    """Return an amount that has been checked."""
    found = parse(text)
    assert found is not None, text
    return found


def of_pod(spec: Object, kind: str = "requests") -> dict[str, float]:
    """Return what all containers of a pod ask for together."""
    total: dict[str, float] = {}
    for container in spec.get("containers", []):
        for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            total[name] = total.get(name, 0.0) + value(amount)
    return total
