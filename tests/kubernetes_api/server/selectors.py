"""Which objects a list or a watch shows: by labels, and by the few fields that a server knows for each kind."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.kubernetes_api.problems import bad_request
from tests.kubernetes_api.resources import Object, Resource

Matches = Callable[[Object], bool]

_FIELDS = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "status.phase"),
    "jobs": ("status.successful",),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "events": (
        *(f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid")),
        *("reason", "reportingComponent", "type"),
    ),
}
"""Fields that can be selected by, besides name and namespace; others are refused, as by a real server."""

_SET = re.compile(r"([^\s!(),=]+)\s+(in|notin)\s+\(([^)]*)\)")


def by_labels(text: str) -> Matches:
    """Read a label selector: `a=b,c!=d,e,!f,g in (h,i),j notin (k)`."""
    checks = [_of_label(part) for part in _parts(text)]
    return lambda item: all(check(item["metadata"].get("labels") or {}) for check in checks)


def by_fields(resource: Resource, text: str) -> Matches:
    """Read a field selector: `a.b=c,d!=e`."""
    checks = []
    for part in _parts(text):
        name, operator, value = _pair(part)
        if name not in ("metadata.name", "metadata.namespace", *_FIELDS.get(resource.plural, ())):
            raise bad_request(f'field label not supported: "{name}"')
        checks.append((name.split("."), operator != "!=", value))

    def matches(item: Object) -> bool:
        return all((_field(item, path) == value) is wanted for path, wanted, value in checks)

    return matches


def by_match(selector: Object) -> Matches:
    """Read `matchLabels` and `matchExpressions` of an object."""

    def matches(item: Object) -> bool:
        labels = item["metadata"].get("labels") or {}
        exact = selector.get("matchLabels") or {}
        if any(labels.get(name) != value for name, value in exact.items()):
            return False
        return all(expression(each, labels) for each in selector.get("matchExpressions") or [])

    return matches


def expression(rule: Object, labels: dict[str, str]) -> bool:
    """Whether labels fit one requirement of a selector or of a node's affinity."""
    value, values = labels.get(rule["key"]), rule.get("values") or []
    held: dict[str, Callable[[], bool]] = {
        "In": lambda: value in values,
        "NotIn": lambda: value not in values,
        "Exists": lambda: value is not None,
        "DoesNotExist": lambda: value is None,
        "Gt": lambda: value is not None and int(value) > int(values[0]),
        "Lt": lambda: value is not None and int(value) < int(values[0]),
    }
    return held[rule["operator"]]()


def _parts(text: str) -> list[str]:
    return [each.strip() for each in re.split(r",(?![^(]*\))", text) if each.strip()]


def _of_label(part: str) -> Callable[[dict[str, str]], bool]:
    if found := _SET.fullmatch(part):
        name, operator, listed = found.groups()
        values = {each.strip() for each in listed.split(",")}
        if operator == "in":
            return lambda labels: labels.get(name) in values
        return lambda labels: labels.get(name) not in values
    if "=" in part:
        name, operator, value = _pair(part)
        return lambda labels: (labels.get(name) == value) is (operator != "!=")
    if part.startswith("!"):
        return lambda labels: part[1:].strip() not in labels
    if re.search(r"[\s()]", part):
        raise bad_request(f"unable to parse requirement: {part!r}")
    return lambda labels: part in labels


def _pair(part: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"([^=!]+?)\s*(==|=|!=)\s*(.*)", part)
    if found is None:
        raise bad_request(f"invalid selector: {part!r}")
    return found[1], found[2], found[3]


def _field(item: Object, path: list[str]) -> str:
    value: object = item
    for name in path:
        value = value.get(name, "") if isinstance(value, dict) else ""
    return str(value)
