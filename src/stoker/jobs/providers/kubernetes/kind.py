"""The kind of target `provider: kubernetes`."""

from __future__ import annotations

from stoker.jobs.provider import ProviderKind
from stoker.jobs.providers.kubernetes.provider import KubernetesProvider
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget

KIND = ProviderKind(settings=KubernetesTarget, make=KubernetesProvider)
