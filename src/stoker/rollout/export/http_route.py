"""Exports a traffic split as an HTTPRoute of the Kubernetes Gateway API.

Source: gateway-api.sigs.k8s.io, HTTPRoute v1 (`backendRefs[].weight`, `matches[].headers`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.rollout.export.backends import Backend
from stoker.rollout.export.split import ExportedSplit, Rule, whole_weights


def http_route(
    split: ExportedSplit, backends: Mapping[int, Backend], *, gateway: str, hostname: str
) -> dict[str, Any]:
    """Build the HTTPRoute object.

    Args:
        split: The model's traffic split.
        backends: Version -> its Service.
        gateway: Name of the Gateway to which the route belongs: NAME or NAMESPACE/NAME.
        hostname: Host whose requests are routed; empty: all hosts of the gateway.
    """
    namespace, _, name = gateway.rpartition("/")
    parent = {"name": name} | ({"namespace": namespace} if namespace else {})
    spec: dict[str, Any] = {"parentRefs": [parent]}
    if hostname:
        spec["hostnames"] = [hostname]
    spec["rules"] = [_rule(rule, backends) for rule in split.rules]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": split.name, "labels": {"app.kubernetes.io/name": split.name}},
        "spec": spec,
    }


def _rule(rule: Rule, backends: Mapping[int, Backend]) -> dict[str, Any]:
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/"}}
    if rule.header:
        # The Gateway API cannot match "present, with any value", so a regular expression matches every value.
        value = rf"(.*;\s*)?{re.escape(rule.cookie)}=.*" if rule.cookie else ".+"
        match["headers"] = [{"type": "RegularExpression", "name": rule.header, "value": value}]
    return {
        "matches": [match],
        "backendRefs": [
            {"name": backends[version].host, "port": backends[version].port, "weight": weight}
            for version, weight in whole_weights(rule.weights).items()
        ],
    }
