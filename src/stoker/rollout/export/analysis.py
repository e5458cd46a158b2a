"""Kubernetes objects that make Argo Rollouts and Flagger query the gates of a rollout.

Source: argoproj/argo-rollouts, docs/analysis/web.md; fluxcd/flagger, docs/gitbook/usage/webhooks.md.
"""

from __future__ import annotations

import json
from importlib import resources
from string import Template
from urllib.parse import quote

from stoker.core.errors import ConfigError, Plain
from stoker.rollout.export.split import ExportedSplit
from stoker.rollout.state.stages import parse_stages

_SHORTEST_INTERVAL_S = 10


def analysis_templates(split: ExportedSplit, *, server: str) -> str:
    """Return Argo Rollouts' AnalysisTemplates: one for background analysis, one for a step.

    Args:
        split: The model's traffic split.
        server: URL of a server that answers with the verdict.
    """
    path = _verdict_path(split.model)
    return _fill(
        "argo",
        name=split.name,
        server=json.dumps(_checked(server)),
        version=json.dumps(str(split.state.candidate)),
        url=json.dumps("{{args.server}}" + path + "?version={{args.version}}"),
    )


def flagger_canary(split: ExportedSplit, *, server: str, gateway: str) -> str:
    """Return Flagger's Canary object, with the percentages of the rollout's stages.

    Args:
        split: The model's traffic split.
        server: URL of a server that answers with the verdict.
        gateway: Name of the Gateway: NAME or NAMESPACE/NAME.
    """
    settings = split.state.settings
    stages = parse_stages(settings.stages)
    # Flagger accepts whole percentages only, and its promotion is the step to 100 %.
    whole = {max(round(stage.share * 100), 1) for stage in stages if 0 < stage.share < 1}
    namespace, _, name = gateway.rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": name}
    # A verdict on another version is neither a success nor a failure: an earlier rollback does not roll back a later
    # release.
    url = f"{_checked(server)}{_verdict_path(split.model)}?version={split.state.candidate}"
    return _fill(
        "flagger",
        name=split.name,
        gateways=json.dumps([parent | ({"namespace": namespace} if namespace else {})]),
        interval=f"{max(round(settings.step_time_s), _SHORTEST_INTERVAL_S)}s",
        weights=json.dumps(sorted(whole) or [100]),
        expect_pass=json.dumps(f"{url}&expect=pass"),
        expect_fail=json.dumps(f"{url}&expect=fail"),
    )


def _verdict_path(model: str) -> str:
    return f"/v1/rollouts/{quote(model, safe='')}/verdict"


def _checked(server: str) -> str:
    plain = server.rstrip("/")
    good = plain.startswith(("http://", "https://")) and plain.isascii() and plain.isprintable()
    if not good or set(plain) & set(' {}"?#'):
        raise ConfigError(
            "--server must be the URL of a server of the model",
            got=server or Plain("none"),
            fix="For example --server http://taxi.models:8501.",
        )
    return plain


def _fill(template: str, **values: str) -> str:
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)
