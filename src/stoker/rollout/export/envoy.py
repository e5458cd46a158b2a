"""A split as a configuration of the Envoy proxy.

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
"""Name of the route configuration, by which the listener finds it in the file."""

_TIMEOUT = "60s"
"""Longest time for an answer. A server's own deadline is 30 s; Envoy's default of 15 s would end before it."""


def envoy_bootstrap(
    split: ExportedSplit,
    backends: Mapping[int, Backend],
    *,
    listen: Backend,
    routes_file: Path | None,
) -> dict[str, Any]:
    """A complete configuration for `envoy -c`: one listener, and a cluster for each version.

    Args:
        split: of a model.
        backends: version -> its servers.
        listen: address of the listener.
        routes_file: Envoy reads the split from this file (`envoy_routes`) and follows its changes;
            None: the split is in this configuration, and a change needs a restart.
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
    """The file that a configuration with `routes_file` reads: a discovery response that contains only the split."""
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
