"""Compares recorded stage results with the types that declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, get_origin, get_type_hints

from stoker.app.context import StageResult, StageResults


def undeclared(results: Mapping[str, Any]) -> dict[str, set[str]]:
    """Stage -> keys that are recorded but not declared, or required but missing."""
    kinds = get_type_hints(StageResults)
    found = {stage: _differing(kinds[stage], result.keys()) for stage, result in results.items()}
    return {stage: keys for stage, keys in found.items() if keys}


def _differing(kind: type, keys: Any) -> set[str]:
    hints = get_type_hints(kind, include_extras=True)
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    optional |= get_type_hints(StageResult).keys()
    return (keys - hints.keys()) | (hints.keys() - optional - keys)
