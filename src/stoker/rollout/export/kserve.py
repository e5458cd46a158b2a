"""Exports a traffic split as KServe's InferenceService.

Source: kserve/kserve at aaac4e2 (after 0.20), `CanarySpec` and `validateCanarySpecs` in pkg/apis/serving/v1beta1;
kserve/kserve#5335: `canaryTrafficPercent` has no effect outside of Knative, without a warning.
"""

from __future__ import annotations

from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.rollout.export.formats import KserveMode
from stoker.rollout.export.split import ExportedSplit, percentages

_DEPLOYMENT_MODES = {KserveMode.KNATIVE: "Knative", KserveMode.STANDARD: "Standard"}
_KNATIVE_VERSIONS = 2
"""Number of versions that Knative can split between: `canaryTrafficPercent` splits between the newest revision and the
last revision that took all traffic."""


def inference_service(split: ExportedSplit, *, mode: KserveMode, storage: str) -> dict[str, Any]:
    """Build the InferenceService object.

    Args:
        split: The model's traffic split.
        mode: `knative`: one predictor with `canaryTrafficPercent`, the share of its newest revision;
            `standard`: `spec.canary`, since KServe 0.20, with the Gateway API.
        storage: URI of a version's storage, with the placeholders `{version}` and optionally `{model}`.
            KServe's TensorFlow runtime expects the version's numbered folder inside it, and no other folder.

    Raises:
        ConfigError: `storage` is the same for all versions.
        UserError: KServe cannot express the split.
    """
    if "{version}" not in storage:
        raise ConfigError(
            "--storage must be the URI of a version's storage and contain {version}",
            got=storage or Plain("none"),
            fix="For example --storage 'gs://models/{model}-v{version}'.",
        )
    shares = percentages(split, program="KServe")
    spec = (
        _knative(split, shares, storage)
        if mode is KserveMode.KNATIVE
        else _standard(split, shares, storage)
    )
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": split.name,
            "labels": {"app.kubernetes.io/name": split.name},
            "annotations": {"serving.kserve.io/deploymentMode": _DEPLOYMENT_MODES[mode]},
        },
        "spec": spec,
    }


def _knative(split: ExportedSplit, shares: dict[int, int], storage: str) -> dict[str, Any]:
    if len(shares) > _KNATIVE_VERSIONS:
        raise UserError(
            "KServe with Knative can split traffic between at most two versions",
            got=Plain(split.summary),
            fix="Use --kserve-mode standard.",
        )
    candidate = split.state.candidate
    share = shares.get(candidate, 0)
    newest = candidate if share else split.state.stable
    predictor = _predictor(split, newest, storage)
    if 0 < share < 100:
        predictor = {"canaryTrafficPercent": share, **predictor}
    return {"predictor": predictor}


def _standard(split: ExportedSplit, shares: dict[int, int], storage: str) -> dict[str, Any]:
    stable = split.state.stable
    # KServe derives the names of Deployments from this name: a candidate keeps its pods when it becomes the stable
    # version.
    spec: dict[str, Any] = {
        "predictor": {"name": f"v{stable}", **_predictor(split, stable, storage)}
    }
    canaries = [
        {
            "trafficPercent": share,
            "predictor": {"name": f"v{version}", **_predictor(split, version, storage, name="")},
        }
        for version, share in shares.items()
        if version != stable
    ]
    return spec | ({"canary": canaries} if canaries else {})


def _predictor(
    split: ExportedSplit, version: int, storage: str, **container: str
) -> dict[str, Any]:
    uri = storage.replace("{model}", split.model).replace("{version}", str(version))
    # KServe's schema requires a container name below `canary`, but its webhook refuses one: "" satisfies both.
    return {"model": {**container, "modelFormat": {"name": "tensorflow"}, "storageUri": uri}}
