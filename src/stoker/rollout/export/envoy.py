"""Exports a traffic split as a configuration of the Envoy proxy.

Source: envoyproxy.io, API v3 (`route.v3.WeightedCluster`, `route.v3.RouteAction.HashPolicy`, `core.v3.PathConfigSource`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.rollout.export.backends import Backend
from stoker.rollout.export.split import ExportedSplit, Rule, whole_weights

_TYPE = "type.googleapis.com/envoy"
_ROUTES = "stoker-rollout"
"""Name of the route configuration; the listener refers to it."""

_TIMEOUT = "60s"
"""Maximum time for an answer. A server's own deadline is 30 s, which Envoy's default of 15 s would cut short."""


def envoy_bootstrap(
    split: ExportedSplit,
    backends: Mapping[int, Backend],
    *,
    listen: Backend,
    routes_file: Path | None,
) -> dict[str, Any]:
    """Return a complete configuration for `envoy -c`: one listener, and a cluster for each version.

    Args:
        split: The model's traffic split.
        backends: Version -> its servers.
        listen: Address of Envoy's listener.
        routes_file: Envoy reads the traffic split from this file (`envoy_routes`) and watches it for changes;
        None: this configuration contains the split, and a change needs a restart.
    """
    manager: dict[str, Any] = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "predict",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    if routes_file is None:
        manager["route_config"] = _route_configuration(split)
    else:
        source = {"path_config_source": {"path": str(routes_file)}, "resource_api_version": "V3"}
        manager["rds"] = {"route_config_name": _ROUTES, "config_source": source}
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    return {
        "node": {"id": split.name, "cluster": "stoker"},
        "static_resources": {
            "listeners": [
                {"name": "predict", "address": _address(listen), "filter_chains": [chain]}
            ],
            "clusters": [
                _cluster(version, backends[version], split.name) for version in split.versions
            ],
        },
    }


def envoy_routes(split: ExportedSplit) -> dict[str, Any]:
    """Return the content of `routes_file`: a discovery response that contains only the traffic split."""
    resource = {
        "@type": f"{_TYPE}.config.route.v3.RouteConfiguration",
        **_route_configuration(split),
    }
    return {"resources": [resource]}


def _route_configuration(split: ExportedSplit) -> dict[str, Any]:
    host = {
        "name": split.name,
        "domains": ["*"],
        "routes": [_route(rule, split.name) for rule in split.rules],
    }
    return {"name": _ROUTES, "virtual_hosts": [host]}


def _route(rule: Rule, name: str) -> dict[str, Any]:
    match: dict[str, Any] = {"prefix": "/"}
    weighted: dict[str, Any] = {
        "clusters": [
            {"name": f"{name}-v{version}", "weight": weight}
            for version, weight in whole_weights(rule.weights).items()
        ]
    }
    action: dict[str, Any] = {"timeout": _TIMEOUT, "weighted_clusters": weighted}
    if rule.cookie:
        regex = {"regex": rf"(.*;\s*)?{re.escape(rule.cookie)}=.*"}
        match["headers"] = [{"name": "cookie", "string_match": {"safe_regex": regex}}]
    elif rule.header:
        match["headers"] = [{"name": rule.header, "present_match": True}]
    if rule.sticky:
        by = (
            {"cookie": {"name": rule.cookie}}
            if rule.cookie
            else {"header": {"header_name": rule.header}}
        )
        action["hash_policy"] = [by]
        weighted["use_hash_policy"] = True
    return {"match": match, "route": action}


def _cluster(version: int, backend: Backend, name: str) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(backend)}}
    return {
        "name": f"{name}-v{version}",
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": f"{name}-v{version}",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }


def _address(backend: Backend) -> dict[str, Any]:
    return {"socket_address": {"address": backend.host, "port_value": backend.port}}
