"""Opens the official client with the credentials of a kubeconfig, or of the pod that submits a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stoker.core.errors import ConfigError, Plain


def open_client(kubeconfig: Path | None, context: str | None) -> tuple[Any, str | None]:
    """Return the client and the namespace of the context.

    Args:
        kubeconfig: File with the credentials; None: the default file.
        context: A context in that file; None: the current context.

    Raises:
        ConfigError: credentials are missing, or the client is not installed.
    """
    try:
        import urllib3
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
    except ModuleNotFoundError as error:
        raise ConfigError(
            "targets of provider kubernetes need the official client",
            got=Plain(f"no module {error.name}"),
            fix='Install it: pip install "stoker[kubernetes]".',
        ) from None
    kube: Any = config  # the module's functions have no type annotations
    settings = client.Configuration()
    namespace = None
    try:
        file = str(kubeconfig.expanduser()) if kubeconfig is not None else None
        try:
            kube.load_kube_config(file, context, settings)
            namespace = _namespace(kube, file, context)
        except ConfigException:
            if kubeconfig is not None or context is not None:
                raise
            kube.load_incluster_config(settings)
            namespace = _own_namespace()
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError) as error:
        raise ConfigError(
            "the credentials of the cluster must be in a kubeconfig",
            got=Plain(str(error).strip() or type(error).__name__),
            fix="Set `kubeconfig` and `context` of the target, or KUBECONFIG; `kubectl config view` shows it.",
        ) from None
    settings.retries = urllib3.Retry(0, redirect=3)  # client.py repeats requests itself
    return client.ApiClient(settings), namespace


def _namespace(config: Any, file: str | None, context: str | None) -> str | None:
    contexts, current = config.list_kube_config_contexts(file)
    chosen = next((each for each in contexts if each["name"] == context), current)
    found = (chosen.get("context") or {}).get("namespace")
    return str(found) if found else None


def _own_namespace() -> str | None:
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text().strip() if file.is_file() else None
