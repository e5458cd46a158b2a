"""The three kinds of patches; server-side apply is not among them."""

from __future__ import annotations

from typing import Any

from tests.kubernetes_api.problems import Refusal, bad_request
from tests.kubernetes_api.resources import Object, Resource, copied

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json-patch+json"

_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name"}
_KEYS |= {"volumeMounts": "mountPath", "conditions": "type", "ownerReferences": "uid"}
"""Lists that a strategic merge merges by the key of their entries. Source: patchMergeKey in the API's types."""


def patched(resource: Resource, item: Object, patch: Any, *, kind: str) -> Object:
    """Return a changed copy of an object."""
    kind = kind.partition(";")[0].strip()
    if kind == JSON:
        return _operations(item, patch)
    if kind == STRATEGIC and resource.definition:
        message = (
            "the body of the request was in an unknown format - accepted media types include: "
        )
        raise Refusal(415, "UnsupportedMediaType", f"{message}{JSON}, {MERGE}")
    if kind not in (MERGE, STRATEGIC):
        raise Refusal(415, "UnsupportedMediaType", f"no patch of type {kind}")
    merged: Object = _merge(item, patch, by_key=kind == STRATEGIC)
    return merged


def _merge(value: Any, patch: Any, *, by_key: bool, name: str = "") -> Any:
    if by_key and isinstance(patch, list) and isinstance(value, list) and name in _KEYS:
        return _merge_list(value, patch, _KEYS[name])
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), change, by_key=by_key, name=key)
    return merged


def _merge_list(value: list[Any], patch: list[Any], key: str) -> list[Any]:
    merged = {each.get(key): each for each in value}
    for change in patch:
        if change.get("$patch") == "delete":
            merged.pop(change.get(key), None)
            continue
        merged[change.get(key)] = _merge(merged.get(change.get(key)), change, by_key=True)
    return list(merged.values())


def _operations(item: Object, operations: Any) -> Object:
    changed = copied(item)
    if not isinstance(operations, list):
        raise bad_request("a JSON patch must be a list of operations")
    for each in operations:
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]
        ]
        place: Any = changed
        try:
            for part in path:
                place = place[int(part)] if isinstance(place, list) else place[part]
            _operate(place, last, each)
        except (KeyError, IndexError, ValueError) as error:
            message = f"the server rejected our request due to an error in our request: {error}"
            raise Refusal(422, "Invalid", message) from None
    return changed


def _operate(place: Any, last: str, operation: Object) -> None:
    kind, value = operation["op"], operation.get("value")
    if isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if kind == "add":
            place.insert(index, value)
        elif kind == "replace":
            place[index] = value
        elif kind == "remove":
            del place[index]
        elif place[index] != value:
            raise ValueError("test failed")
    elif kind == "add" or (kind == "replace" and last in place):
        place[last] = value
    elif kind == "remove":
        del place[last]
    elif place[last] != value:
        raise ValueError("test failed")
