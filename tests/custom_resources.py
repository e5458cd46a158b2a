"""Objects against the schemas of their CustomResourceDefinitions, as strictly as a typing mistake needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

SOURCES = {
    "HTTPRoute": "kubernetes-sigs/gateway-api, config/crd/standard",
    "InferenceService": "kserve/kserve, config/crd/full/serving.kserve.io_inferenceservices.yaml",
    "AnalysisTemplate": "argoproj/argo-rollouts, manifests/crds",
    "Canary": "fluxcd/flagger, artifacts/flagger/crd.yaml",
    "PrometheusRule": "prometheus-operator/prometheus-operator, example/prometheus-operator-crd",
    "ServiceMonitor": "prometheus-operator/prometheus-operator, example/prometheus-operator-crd",
    "PodMonitor": "prometheus-operator/prometheus-operator, example/prometheus-operator-crd",
}
"""Kind -> where its definition comes from. Their CEL rules are not checked."""

_OWN = ("apiVersion", "kind", "metadata")


def definition(folder: Path, kind: str) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind, from a folder of YAML files.

    Skips the test where no file has it.
    """
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text("utf-8")
        if f"kind: {kind}\n" not in text:
            continue
        for found in yaml.load_all(text, yaml.CSafeLoader):
            if found and found["spec"]["names"]["kind"] == kind:
                return dict(found)
    pytest.skip(f"{folder} has no CustomResourceDefinition of {kind}: {SOURCES[kind]}")


def validate(custom: dict[str, Any], found: dict[str, Any]) -> None:
    """Check an object; a field that the schema does not know is an error, though a cluster would drop it.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    group, version = custom["apiVersion"].split("/")
    assert found["spec"]["group"] == group
    assert set(custom) <= {*_OWN, "spec"}
    (schema,) = (
        each["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for each in found["spec"]["versions"]
        if each["name"] == version
    )
    # Without a check of the schema itself, which takes longer than all the rest.
    jsonschema.Draft202012Validator(closed_schema(schema)).validate(custom["spec"])


def closed_schema(schema: Any) -> Any:
    """The schema, but without room for other fields."""
    if isinstance(schema, list):
        return [closed_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: closed_schema(value) for name, value in schema.items()}
    has_fields = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if has_fields and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
