"""The kind of target `provider: local`."""

from __future__ import annotations

from stoker.jobs.provider import ProviderKind
from stoker.jobs.providers.local.provider import LocalProvider
from stoker.jobs.providers.local.settings import LocalSettings

KIND = ProviderKind(settings=LocalSettings, make=LocalProvider)
