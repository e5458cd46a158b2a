"""Exports a rollout's traffic split in one of the formats."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    """Options of an export: facts about the other program that the rollout's state does not contain."""

    backends: Mapping[int, Backend] = field(default_factory=dict)
    """Version -> its servers. The default for a version is the Service MODEL-vVERSION."""

    gateway: str = "gateway"
    """The Gateway of an HTTPRoute or of Flagger: NAME or NAMESPACE/NAME."""

    hostname: str = ""
    """For an HTTPRoute: host whose requests are routed; empty: all hosts."""

    listen: Backend = Backend(host="127.0.0.1", port=10_000)  # noqa: RUF009 - frozen
    """Address of Envoy's listener."""

    routes_file: Path | None = None
    """For Envoy: file from which it reads the split, and which it watches; None: its configuration contains the
    split."""

    kserve_mode: KserveMode = KserveMode.STANDARD
    """How KServe deploys the model."""

    storage: str = ""
    """For KServe: URI of a version's storage, with the placeholder `{version}`."""

    server: str = ""
    """For Argo and Flagger: URL of a server that returns the verdict; empty: http://MODEL:8501."""

    base_path: str = ""
    """For TensorFlow Serving: path of the model's folder on the server."""

    config: Path | None = None
    """For TensorFlow Serving: the server's `model_config_file`; its other models are kept."""


def export_text(split: ExportedSplit, to: Format, options: ExportOptions) -> str:
    """Return the content of the exported file.

    Raises:
        ConfigError: an option is missing or wrong.
        UserError: the program cannot express the split.
    """
    backends = backends_of(split.versions, dict(options.backends), name=split.name)
    server = options.server or f"http://{split.name}:8501"
    match to:
        case Format.HTTPROUTE:
            route = http_route(split, backends, gateway=options.gateway, hostname=options.hostname)
            return _yaml(split, route, *_notes_of_keys(split))
        case Format.ENVOY:
            listen, routes_file = options.listen, options.routes_file
            return _yaml(
                split, envoy_bootstrap(split, backends, listen=listen, routes_file=routes_file)
            )
        case Format.ENVOY_ROUTES:
            return _yaml(split, envoy_routes(split))
        case Format.KSERVE:
            service = inference_service(split, mode=options.kserve_mode, storage=options.storage)
            return _yaml(split, service, _KSERVE_NOTES[options.kserve_mode])
        case Format.ARGO:
            return analysis_templates(split, server=server)
        case Format.FLAGGER:
            return flagger_canary(split, server=server, gateway=options.gateway)
        case Format.TF_SERVING:
            config = model_server_config(
                split, base_path=options.base_path, others=options.config, now_s=time.time()
            )
            return f"{_head(split)}{config_text(config)}"


_KSERVE_NOTES = {
    KserveMode.KNATIVE: "For Knative: in Standard mode KServe ignores canaryTrafficPercent and says nothing.",
    KserveMode.STANDARD: "Needs KServe 0.20 with enableGatewayApi; an older one drops spec.canary.",
}


def _head(split: ExportedSplit, *notes: str) -> str:
    lines = [f"{split.summary}. Written by `stoker rollout export`.", *notes]
    return "".join(f"# {line}\n" for line in lines)


def _yaml(split: ExportedSplit, content: Mapping[str, Any], *notes: str) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)
    return f"{_head(split, *notes)}{text}"


def _notes_of_keys(split: ExportedSplit) -> list[str]:
    return [
        f"Requests of one {rule.header} may go to different versions: an HTTPRoute draws each request."
        for rule in split.rules
        if rule.sticky
    ]
