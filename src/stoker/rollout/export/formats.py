"""The export formats and the options of each. Imports little, because every `stoker` command imports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from stoker.core.errors import ConfigError, Plain


class Format(StrEnum):
    """The format of an export."""

    HTTPROUTE = "httproute"
    ENVOY = "envoy"
    ENVOY_ROUTES = "envoy-routes"
    KSERVE = "kserve"
    ARGO = "argo"
    FLAGGER = "flagger"
    TF_SERVING = "tf-serving"


class KserveMode(StrEnum):
    """How KServe deploys a model."""

    STANDARD = "standard"
    """Plain Deployments: `spec.canary`, since KServe 0.20."""

    KNATIVE = "knative"
    """Knative revisions: `canaryTrafficPercent`."""


_APPLIES: Mapping[str, tuple[Format, ...]] = {
    "backend": (Format.HTTPROUTE, Format.ENVOY),
    "gateway": (Format.HTTPROUTE, Format.FLAGGER),
    "hostname": (Format.HTTPROUTE,),
    "listen": (Format.ENVOY,),
    "routes": (Format.ENVOY,),
    "kserve-mode": (Format.KSERVE,),
    "storage": (Format.KSERVE,),
    "server": (Format.ARGO, Format.FLAGGER),
    "base-path": (Format.TF_SERVING,),
    "config": (Format.TF_SERVING,),
    "target": (Format.TF_SERVING,),
}


def check_applies(to: Format, given: Iterable[str]) -> None:
    """Refuse options that have no effect on a format.

    Args:
        to: Format of the export.
        given: Names of the options that the user set.

    Raises:
        ConfigError: an option belongs to another format.
    """
    for name in given:
        if to not in _APPLIES[name]:
            raise ConfigError(
                f"--{name} is for --to {' or '.join(_APPLIES[name])}",
                got=Plain(f"--to {to}"),
                fix=f"Leave --{name} out.",
            )
