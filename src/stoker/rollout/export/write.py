"""Writes a rollout's split for another program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.rollout.export.analysis import analysis_templates, flagger_canary
from stoker.rollout.export.backends import Backend, backends_of
from stoker.rollout.export.envoy import envoy_bootstrap, envoy_routes
from stoker.rollout.export.formats import Format, KserveMode
from stoker.rollout.export.http_route import http_route
from stoker.rollout.export.kserve import inference_service
from stoker.rollout.export.split import ExportedSplit
from stoker.rollout.export.tf_serving import config_text, model_server_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What the state does not know about the program in front of the servers."""

    backends: Mapping[int, Backend] = field(default_factory=dict)
    """Version -> its servers; the others have a Service of the name MODEL-vVERSION."""

    gateway: str = "gateway"
    """The Gateway of an HTTPRoute or of Flagger: NAME or NAMESPACE/NAME."""

    hostname: str = ""
    """Only requests to this host follow an HTTPRoute; empty: all."""

    listen: Backend = Backend(host="127.0.0.1", port=10_000)  # noqa: RUF009 - frozen
    """Address of Envoy's listener."""

    routes_file: Path | None = None
    """Envoy reads the split from this file, and follows its changes; None: it is in the configuration."""

    kserve_mode: KserveMode = KserveMode.STANDARD
    """How KServe deploys."""

    storage: str = ""
    """For KServe: URI of a version's storage, with `{version}` in it."""

    server: str = ""
    """For Argo and Flagger: URL of a server; empty: http://MODEL:8501."""

    base_path: str = ""
    """For TensorFlow Serving: folder of the model's versions, as its server sees it."""

    config: Path | None = None
    """For TensorFlow Serving: its `model_config_file`, whose other models are kept."""


def export_text(split: ExportedSplit, to: Format, options: ExportOptions) -> str:
    """The content of the file.

    Raises:
        ConfigError: an option is missing or wrong.
        UserError: the program cannot express the split.
    """
    return _WRITERS[to](split, options)


def _yaml(split: ExportedSplit, content: Mapping[str, Any], *notes: str) -> str:
    lines = [f"{split.summary}. Written by `stoker rollout export`.", *notes]
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)


def _http_route(split: ExportedSplit, options: ExportOptions) -> str:
    backends = backends_of(split.versions, dict(options.backends), name=split.name)
    route = http_route(split, backends, gateway=options.gateway, hostname=options.hostname)
    sticky = [rule.header for rule in split.rules if rule.sticky]
    notes = [
        f"Requests of one {name} may go to different versions: an HTTPRoute draws each request."
        for name in sticky
    ]
    return _yaml(split, route, *notes)


def _envoy(split: ExportedSplit, options: ExportOptions) -> str:
    backends = backends_of(split.versions, dict(options.backends), name=split.name)
    bootstrap = envoy_bootstrap(
        split, backends, listen=options.listen, routes_file=options.routes_file
    )
    return _yaml(split, bootstrap)


def _envoy_routes(split: ExportedSplit, _: ExportOptions) -> str:
    return _yaml(split, envoy_routes(split))


def _kserve(split: ExportedSplit, options: ExportOptions) -> str:
    service = inference_service(split, mode=options.kserve_mode, storage=options.storage)
    notes = {
        KserveMode.KNATIVE: "For Knative: in Standard mode KServe ignores canaryTrafficPercent and says nothing.",
        KserveMode.STANDARD: "Needs KServe 0.20 with enableGatewayApi; an older one drops spec.canary.",
    }
    return _yaml(split, service, notes[options.kserve_mode])


def _argo(split: ExportedSplit, options: ExportOptions) -> str:
    return analysis_templates(split, server=options.server or f"http://{split.name}:8501")


def _flagger(split: ExportedSplit, options: ExportOptions) -> str:
    server = options.server or f"http://{split.name}:8501"
    return flagger_canary(split, server=server, gateway=options.gateway)


def _tf_serving(split: ExportedSplit, options: ExportOptions) -> str:
    config = model_server_config(
        split, base_path=options.base_path, others=options.config, now_s=time.time()
    )
    return f"# {split.summary}. Written by `stoker rollout export`.\n{config_text(config)}"


_WRITERS: Mapping[Format, Callable[[ExportedSplit, ExportOptions], str]] = {
    Format.HTTPROUTE: _http_route,
    Format.ENVOY: _envoy,
    Format.ENVOY_ROUTES: _envoy_routes,
    Format.KSERVE: _kserve,
    Format.ARGO: _argo,
    Format.FLAGGER: _flagger,
    Format.TF_SERVING: _tf_serving,
}
