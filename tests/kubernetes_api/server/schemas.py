"""Objects against their schemas: an unknown field is never silent, as with `fieldValidation=Strict`.

Kubernetes' own kinds are checked against the schemas of `kubernetes_validate`, custom ones against their definitions.
Rules in CEL (`x-kubernetes-validations`) are not run; those that matter here are in `admission`.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import referencing
from tests.custom_resources import closed_schema
from tests.kubernetes_api.problems import Refusal, invalid
from tests.kubernetes_api.resources import Object, Resource, read_definition

VERSION = "1.37"
"""Of Kubernetes."""

_SCHEMAS = Path(str(importlib.resources.files("kubernetes_validate"))) / "kubernetes-json-schema"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUOTED = re.compile(r"'([^']+)'")


def check_schema(resource: Resource, version: str, item: Object) -> None:
    """Refuse an object with unknown fields (400) or with fields of the wrong type or missing ones (422)."""
    validator = _validator(resource, version)
    if validator is None:
        return
    checked = {name: value for name, value in item.items() if name != "status"}
    if resource.definition:
        checked = {"spec": item.get("spec", {})}
    unknown: list[str] = []
    wrong: list[str] = []
    for error in validator.iter_errors(checked):
        path = _path(error.absolute_path)
        if error.validator == "additionalProperties":
            allowed = error.schema.get("properties", {})
            extra = [name for name in error.instance if name not in allowed]
            unknown += [f'unknown field "{path}{"." if path else ""}{name}"' for name in extra]
        elif error.validator == "required":
            missing = next(iter(_QUOTED.findall(error.message)), "?")
            wrong.append(f"{path}.{missing}: Required value".lstrip("."))
        else:
            wrong.append(f"{path}: Invalid value: {error.message[:300]}")
    if unknown:
        raise Refusal(400, "BadRequest", f"strict decoding error: {', '.join(sorted(unknown))}")
    if wrong:
        raise invalid(resource, item["metadata"].get("name", ""), sorted(wrong))


def check_name(resource: Resource, item: Object) -> None:
    """Refuse a name that DNS would not take."""
    metadata = item["metadata"]
    name = metadata.get("name") or metadata.get("generateName", "")
    if not name:
        raise invalid(
            resource, "", ["metadata.name: Required value: name or generateName is required"]
        )
    label = name.rstrip("-") if "generateName" in metadata and "name" not in metadata else name
    single = resource.plural in ("services", "jobsets", "namespaces")
    parts = [label] if single else label.split(".")
    longest = 63 if single or resource.plural == "jobs" else 253
    if len(name) > longest or not all(_LABEL.fullmatch(part) for part in parts):
        rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        raise invalid(resource, name, [f'metadata.name: Invalid value: "{name}": {rule}'])
    causes = _wrong_labels("metadata", metadata)
    template = item.get("spec", {}).get("template", {})
    if isinstance(template, dict):
        causes += _wrong_labels("spec.template", template.get("metadata", {}))
    if causes:
        raise invalid(resource, name, causes)


_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)


def _wrong_labels(where: str, metadata: Object) -> list[str]:
    causes = []
    for key, value in (metadata.get("labels") or {}).items():
        if not _KEY.fullmatch(key):
            causes.append(
                f'{where}.labels: Invalid value: "{key}": name part must be a qualified name'
            )
        if not isinstance(value, str) or len(value) > 63 or not _VALUE.fullmatch(value):
            rule = "a valid label must be an empty string or consist of at most 63 alphanumeric characters, '-', '_' or '.'"
            causes.append(f'{where}.labels: Invalid value: "{value}": {rule}')
    for key, value in (metadata.get("annotations") or {}).items():
        if not _KEY.fullmatch(key) or not isinstance(value, str):
            causes.append(
                f'{where}.annotations: Invalid value: "{key}": not a qualified name and a text'
            )
    return causes


@functools.cache
def _validator(resource: Resource, version: str) -> Any:
    return _own(resource, version) if resource.definition else _built_in(resource, version)


def _built_in(resource: Resource, version: str) -> Any:
    folder = _SCHEMAS / f"v{VERSION}.0-local-strict"
    group = resource.group.partition(".")[0]
    name = "-".join(filter(None, (resource.kind.lower(), group, version)))
    schema = json.loads((folder / f"{name}.json").read_text("utf-8"))
    registry: Any = _definitions(folder) @ referencing.Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(folder: Path) -> Any:
    text = (folder / "_definitions.json").read_text("utf-8")
    return referencing.Resource.from_contents(json.loads(text))


def _own(resource: Resource, version: str) -> Any:
    found = read_definition(resource)
    if found is None:
        return None
    schemas = {
        each["name"]: each["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for each in found["spec"]["versions"]
    }
    schema = {"type": "object", "properties": {"spec": closed_schema(schemas[version])}}
    return jsonschema.Draft202012Validator(schema)


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
